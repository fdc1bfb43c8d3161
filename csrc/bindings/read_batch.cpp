#include "read_batch.h"

#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "arrays.h"

namespace nb = nanobind;

namespace octavo {

namespace {

using Ints = Array<int32_t>;

void expect(bool holds, const char* otherwise) {
    if (!holds) throw std::invalid_argument(otherwise);
}

template <typename T>
const T* numbers(const nb::object& object, const char* name) {
    return get_array<Array<T>>(object, name).data();
}

// Returns an array whose length the step's other arrays determine.
template <typename T>
const T* numbers(const nb::object& object, const char* name, size_t wanted) {
    const auto array = get_array<Array<T>>(object, name);
    if (array.size() != wanted)
        throw std::invalid_argument(std::string(name) + ": got " + std::to_string(array.size()) +
                                    " numbers, the batch needs " + std::to_string(wanted));
    return array.data();
}

// Returns null if the attribute is None: the caller does not want these results.
template <typename T>
T* out_numbers(const nb::object& object, const char* name) {
    return object.attr(name).is_none() ? nullptr : get_array<Out<T>>(object, name).data();
}

void read_results(SampleArgs& a, const nb::object& result, size_t num_samples) {
    const auto ids = get_array<Out<int32_t>>(result, "token_ids");
    if (ids.size() < num_samples) throw std::invalid_argument("token_ids: fewer than sampled rows");
    a.out_ids = ids.data();
    a.out_failed = reinterpret_cast<uint8_t*>(out_numbers<bool>(result, "failed"));
    a.out_logprobs = out_numbers<float>(result, "logprobs");
    a.out_ranks = out_numbers<int32_t>(result, "ranks");
    a.out_top_logprobs = out_numbers<float>(result, "top_logprobs");
    a.out_surprises = out_numbers<float>(result, "surprises");
    if (a.skips_cutoffs) {
        const auto proof = get_array<Out<int32_t, nb::ndim<2>>>(result, "proof_tokens");
        if (proof.shape(0) < num_samples || proof.shape(1) != kMaxProofTokens)
            throw std::invalid_argument("proof_tokens: not 16 of each row");
        a.out_cutoff_proofs = proof.data();
    }
    if (result.attr("top_ids").is_none()) return;
    const auto top_ids = get_array<Out<int32_t, nb::ndim<2>>>(result, "top_ids");
    a.out_top_ids = top_ids.data();
    a.max_top = static_cast<int>(top_ids.shape(1));
}

// Returns NumPy's name of a type of 4 or 8 bytes.
template <typename T>
const char* numpy_format() {
    if (std::is_same_v<T, float>) return "f4";
    if (sizeof(T) == 8) return std::is_signed_v<T> ? "i8" : "u8";
    return std::is_signed_v<T> ? "i4" : "u4";
}

// Returns the records as bytes, since nanobind does not accept NumPy's structured arrays.
const SamplingRecord* read_records(const nb::object& sampling, size_t num_samples) {
    const nb::object records = sampling.attr("records"), bytes = records.attr("view")("uint8");
    Array<uint8_t> array;
    if (!nb::try_cast<Array<uint8_t>>(bytes, array, false) ||
        array.size() != num_samples * sizeof(SamplingRecord))
        throw nb::type_error("records: not a C-contiguous array of one SAMPLING_RECORD for each sampled row");
    return reinterpret_cast<const SamplingRecord*>(array.data());
}

// Checks that requests own consecutive rows of the step; padding may follow.
void check_rows(const Ints& query_starts, size_t num_tokens) {
    expect(query_starts.size() > 0, "query_starts: empty, expected at least one entry");
    const int32_t* starts = query_starts.data();
    const size_t num_requests = query_starts.size() - 1;
    expect(starts[0] == 0, "query_starts: the first request does not start at row 0");
    for (size_t i = 0; i < num_requests; i++)
        expect(starts[i] <= starts[i + 1], "query_starts: a request ends before it starts");
    expect(static_cast<size_t>(starts[num_requests]) <= num_tokens,
           "query_starts: ends behind the rows of the step");
}

// Reads the input rows of a step, if it has any.
void read_input_rows(Batch& b, const nb::object& batch) {
    if (batch.attr("input_rows").is_none()) return;
    const auto rows = get_array<Array<float, nb::ndim<2>>>(batch, "input_rows");
    b.input_rows = rows.data();
    b.num_input_rows = static_cast<int>(rows.shape(0));
    b.input_width = static_cast<int>(rows.shape(1));
    b.input_row_indices = numbers<int32_t>(batch, "input_row_indices", b.num_tokens);
    for (int t = 0; t < b.num_tokens; t++)
        expect(b.input_row_indices[t] < b.num_input_rows,
               "input_row_indices: an index beyond the last input row");
}

// Reads the further slots that rows write to, if there are any.
void read_copies(Batch& b, const nb::object& batch, size_t num_groups) {
    const nb::object copies = batch.attr("copies");
    if (copies.is_none()) return;
    b.copy_starts = numbers<int32_t>(copies, "starts", static_cast<size_t>(b.num_tokens) + 1);
    expect(b.copy_starts[0] == 0, "copies: the first row's do not start at 0");
    for (int t = 0; t < b.num_tokens; t++)
        expect(b.copy_starts[t] <= b.copy_starts[t + 1], "copies: a row's end before they start");
    b.num_copies = b.copy_starts[b.num_tokens];
    b.copy_slots = numbers<int32_t>(copies, "slots", num_groups * b.num_copies);
}

}  // namespace

SampleArgs read_sampling(const nb::object& sampling, size_t num_samples) {
    SampleArgs a{};
    a.records = read_records(sampling, num_samples);
    a.history_starts = numbers<int32_t>(sampling, "history_starts");
    a.history_ids = numbers<int32_t>(sampling, "history_ids");
    a.history_counts = numbers<int32_t>(sampling, "history_counts");
    a.bias_starts = numbers<int32_t>(sampling, "bias_starts");
    a.bias_ids = numbers<int32_t>(sampling, "bias_ids");
    a.bias_values = numbers<float>(sampling, "bias_values");
    a.allowed_masks = numbers<uint32_t>(sampling, "allowed_masks");
    return a;
}

Batch read_batch(const nb::object& batch, const nb::object& output, int num_steps) {
    const auto token_ids = get_array<Ints>(batch, "token_ids");
    const auto positions = get_array<Array<int32_t, nb::ndim<2>>>(batch, "positions");
    const auto query_starts = get_array<Ints>(batch, "query_starts");
    const auto block_tables = get_array<Array<int32_t, nb::ndim<3>>>(batch, "block_tables");
    const auto sample_rows = get_array<Ints>(batch, "sample_rows");
    const size_t num_tokens = token_ids.size(), num_groups = block_tables.shape(0);
    check_rows(query_starts, num_tokens);
    Batch b{};
    b.num_tokens = static_cast<int>(num_tokens);
    b.num_axes = static_cast<int>(positions.shape(0));
    b.num_requests = static_cast<int>(query_starts.size()) - 1;
    b.num_samples = static_cast<int>(sample_rows.size());
    b.table_width = static_cast<int>(block_tables.shape(2));
    expect(positions.shape(1) == num_tokens, "positions: not one of each axis for each row of the step");
    expect(block_tables.shape(1) == static_cast<size_t>(b.num_requests),
           "block_tables: not one for each request");
    b.token_ids = token_ids.data();
    b.key_indices = numbers<int32_t>(batch, "key_indices", num_tokens);
    b.positions = positions.data();
    b.query_starts = query_starts.data();
    b.context_lens = numbers<int32_t>(batch, "context_lens", num_groups * b.num_requests);
    b.slots = numbers<int32_t>(batch, "slots", num_groups * num_tokens);
    b.block_tables = block_tables.data();
    b.sample_rows = sample_rows.data();
    if (!batch.attr("adapter_rows").is_none())
        b.adapters = numbers<int32_t>(batch, "adapter_rows", num_tokens);
    if (!batch.attr("sparse_from").is_none())
        b.sparse_from = numbers<int32_t>(batch, "sparse_from", b.num_requests);
    read_input_rows(b, batch);
    read_copies(b, batch, num_groups);
    if (!batch.attr("limits").is_none()) b.limits = numbers<int32_t>(batch, "limits", num_tokens);
    if (!batch.attr("hidden").is_none()) {
        const auto hidden = get_array<Array<float, nb::ndim<2>>>(batch, "hidden");
        expect(hidden.shape(0) == num_tokens, "hidden: not one row for each of the step");
        b.hidden = hidden.data();
        b.hidden_width = static_cast<int>(hidden.shape(1));
    }
    const nb::object sampling = batch.attr("sampling");
    b.has_sampling = !sampling.is_none();
    if (b.has_sampling) {
        b.sampling = read_sampling(sampling, b.num_samples);
        b.keeps_logits = nb::cast<bool>(sampling.attr("keeps_logits"));
        if (!sampling.attr("deferred").is_none())
            b.deferred = reinterpret_cast<const uint8_t*>(
                numbers<bool>(sampling, "deferred", static_cast<size_t>(b.num_samples)));
        if (!sampling.attr("without_cutoffs").is_none())
            b.sampling.skips_cutoffs = reinterpret_cast<const uint8_t*>(
                numbers<bool>(sampling, "without_cutoffs", static_cast<size_t>(b.num_samples)));
        read_results(b.sampling, output.attr("samples"), static_cast<size_t>(b.num_samples) * num_steps);
    } else {
        const nb::dict arrays(output.attr("arrays"));
        expect(arrays.size() == 1, "arrays: not the one that the program makes");
        b.out_rows = nb::cast<Out<float>>((*arrays.begin()).second).data();
    }
    return b;
}

nb::dict sampling_record() {
    nb::list names, formats, offsets;
    const auto add = [&](const char* name, const char* format, size_t offset) {
        names.append(name);
        formats.append(format);
        offsets.append(offset);
    };
#define OCTAVO_FIELD(type, name) add(#name, numpy_format<type>(), offsetof(SamplingRecord, name));
    OCTAVO_SAMPLING_FIELDS(OCTAVO_FIELD)
#undef OCTAVO_FIELD
    nb::dict type;
    type["names"] = names;
    type["formats"] = formats;
    type["offsets"] = offsets;
    type["itemsize"] = sizeof(SamplingRecord);
    return type;
}

EndTokens read_end_tokens(const nb::object& steps, int num_requests) {
    const auto starts = get_array<Ints>(steps, "end_starts");
    if (starts.size() != static_cast<size_t>(num_requests) + 1)
        throw std::invalid_argument("decode steps: end tokens of another number of requests");
    return EndTokens{starts.data(), numbers<int32_t>(steps, "end_ids")};
}

}  // namespace octavo
