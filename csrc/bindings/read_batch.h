// Reads a step from the data classes of executor/batch.py, attribute by attribute.
//
// The results point into the objects' NumPy arrays and are valid as long as the objects live.
#pragma once

#include <nanobind/nanobind.h>

#include "../runtime/decode_batch.h"
#include "../runtime/step.h"

namespace octavo {

// Reads a StepBatch, and the StepOutput to fill: the samples of `num_steps` steps if the batch samples,
// else its one array. TypeError names an attribute that is not the array that its field describes,
// ValueError one whose length or rows do not match the step.
Batch read_batch(const nanobind::object& batch, const nanobind::object& output, int num_steps = 1);

// Reads a SamplingBatch of `num_samples` rows, without its outputs.
SampleArgs read_sampling(const nanobind::object& sampling, size_t num_samples);

// Reads the stop tokens of each of the `num_requests` requests of a DecodeSteps.
EndTokens read_end_tokens(const nanobind::object& steps, int num_requests);

// Describes SamplingRecord as a dict for numpy.dtype, so that Python can compare it with its own.
nanobind::dict sampling_record();

}  // namespace octavo
