// Reads a step out of the data classes of backends/batch.py, attribute by attribute.
//
// What is read points into the objects' NumPy arrays: it is good for as long as the objects live.
#pragma once

#include <nanobind/nanobind.h>

#include "decode_batch.h"
#include "step.h"

namespace octavo {

// A StepBatch, and the StepOutput that it fills in: the samples of `num_steps` steps where the batch draws,
// the array "logits" otherwise. TypeError names an attribute that is not an array as its field says.
Batch read_batch(const nanobind::object& batch, const nanobind::object& output, int num_steps = 1);

// The tokens that end the `num_requests` requests of a DecodeSteps.
EndTokens read_end_tokens(const nanobind::object& steps, int num_requests);

// SamplingRecord as the dict that numpy.dtype takes, for Python to compare with its own.
nanobind::dict sampling_record();

}  // namespace octavo
