// Reads a step out of the data classes of executor/batch.py, attribute by attribute.
//
// What it returns points into the objects' NumPy arrays, and is valid for as long as the objects live.
#pragma once

#include <nanobind/nanobind.h>

#include "../runtime/decode_batch.h"
#include "../runtime/step.h"

namespace octavo {

// Reads a StepBatch, and the StepOutput to fill in: the samples of `num_steps` steps where the batch draws,
// the one array otherwise. TypeError names an attribute that is not the array that its field describes,
// ValueError one whose length or rows are not those of the step.
Batch read_batch(const nanobind::object& batch, const nanobind::object& output, int num_steps = 1);

// Reads how a SamplingBatch draws from `num_draws` rows, without where its results go.
SampleArgs read_sampling(const nanobind::object& sampling, size_t num_draws);

// Reads the tokens that end each of the `num_requests` requests of a DecodeSteps.
EndTokens read_end_tokens(const nanobind::object& steps, int num_requests);

// Describes SamplingRecord as the dict that numpy.dtype takes, so that Python can compare it with its own.
nanobind::dict sampling_record();

}  // namespace octavo
