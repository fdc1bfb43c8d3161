// The extension module octavo.executor.native._native. Arrays cross the boundary as NumPy arrays that live
// at least as long as the call. The GIL is released while a step runs.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../plan/op.h"
#include "../runtime/levels.h"
#include "bind.h"
#include "read_batch.h"
#include "source_digest.h"

namespace octavo {

NB_MODULE(_native, m) {
    m.def("supported_levels", &supported_levels, "Instruction-set levels that this machine runs, best last.");
    m.attr("SOURCE_DIGEST") = source_digest();
    m.attr("SAMPLE_CHUNK") = kSampleChunk;
    m.attr("MOST_CANDIDATES") = kMaxCandidates;
    m.attr("SAMPLING_RECORD") = sampling_record();
    bind_device(m);
    bind_packing(m);
    bind_kv(m);
    bind_weights(m);
    bind_ranks(m);
    bind_plan(m);
    bind_runner(m);
}

}  // namespace octavo
