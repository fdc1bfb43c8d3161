// Several decode steps of one batch, computed on demand.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "../runtime/decode_batch.h"
#include "read_batch.h"
#include "runner.h"

namespace octavo {

class DecodeCall {
  public:
    // batch: StepBatch; output: StepOutput, whose arrays have room for the results of all steps; steps:
    // DecodeSteps. Keeps the batch and the output alive.
    DecodeCall(BoundRunner& runner, const nb::object& batch, const nb::object& output,
               const std::shared_ptr<KvMemory>& kv, const nb::object& steps)
        : runner_(runner),
          batch_(batch),
          output_(output),
          steps_(steps),
          kv_(kv),
          num_steps_(nb::cast<int>(steps.attr("num_steps"))),
          follows_tokens_(nb::cast<bool>(steps.attr("follows_tokens"))),
          first_(read_batch(batch, output, num_steps_)),
          decoding_(first_, kv->num_groups(), num_steps_, read_end_tokens(steps, first_.num_requests)) {}
    DecodeCall(const DecodeCall&) = delete;
    DecodeCall& operator=(const DecodeCall&) = delete;

    // Computes the next step and verifies its samples like BoundRunner::run. Returns whether another step
    // may follow: fewer than num_steps are done, and no request has ended or failed.
    bool step(const nb::object& check) {
        if (num_done_ > 0 && follows_tokens_)
            decoding_.set_sampling_inputs(
                read_sampling(batch_.attr("sampling"), static_cast<size_t>(first_.num_samples)));
        runner_.run_and_check(decoding_.batch(), *kv_, check, num_done_);
        return ++num_done_ < num_steps_ && decoding_.advance();
    }

  private:
    BoundRunner& runner_;
    const nb::object batch_, output_, steps_;
    const std::shared_ptr<KvMemory> kv_;
    const int num_steps_;
    const bool follows_tokens_;
    const Batch first_;
    DecodeBatch decoding_;
    int num_done_ = 0;
};

}  // namespace octavo
