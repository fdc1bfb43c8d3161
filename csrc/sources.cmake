# The sources of the executor, which both the extension and the native tests are built from.
set(OCTAVO_CORE
    attention_plan.cpp
    ceilings.cpp
    decode_batch.cpp
    disk_rate.cpp
    executor.cpp
    experts.cpp
    key_selection.cpp
    kv_spill.cpp
    levels.cpp
    memory.cpp
    mixers.cpp
    neuron_cache.cpp
    packing.cpp
    row_ops.cpp
    shared_ranks.cpp
    step.cpp
    thread_pool.cpp
    weight_file.cpp
    weight_stream.cpp)
list(TRANSFORM OCTAVO_CORE PREPEND "${CMAKE_CURRENT_LIST_DIR}/core/")
