// Written by docs/generate.py from octavo/api/sampling_params.py. Do not edit.

#pragma once

// clang-format off

// X(type, name) of each field of SamplingRecord, in order.
#define OCTAVO_SAMPLING_FIELDS(X) \
    X(uint64_t, seed) \
    X(uint32_t, position) \
    X(uint32_t, sample_index) \
    X(int32_t, target_id) \
    X(int32_t, num_logprobs) \
    X(int32_t, allowed_mask) \
    X(float, mirostat_mu) \
    X(float, repetition_penalty) \
    X(float, frequency_penalty) \
    X(float, presence_penalty) \
    X(float, top_n_sigma) \
    X(float, temperature) \
    X(float, dynatemp_range) \
    X(float, dynatemp_exponent) \
    X(float, typical_p) \
    X(float, min_p) \
    X(int32_t, top_k) \
    X(float, top_p) \
    X(float, xtc_probability) \
    X(float, xtc_threshold) \
    X(int32_t, mirostat_mode)

// X(name, neutral value) of each distribution filter.
#define OCTAVO_DISTRIBUTION_FILTERS(X) \
    X(top_n_sigma, 0) \
    X(dynatemp_range, 0) \
    X(typical_p, 1)

// X(name, neutral value) of each after_cutoff filter.
#define OCTAVO_AFTER_CUTOFF_FILTERS(X) \
    X(xtc_probability, 0) \
    X(mirostat_mode, 0)
