# The instruction-set levels: each has the flags of the one before and its own. What a level needs of a machine is
# in runtime/levels.cpp.
set(OCTAVO_LEVELS portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # Zig has another name for this processor, and compiles for it where none is named.
  if(NOT "${CMAKE_CXX_COMPILER_ARG1}" MATCHES "ziglang")
    set(OCTAVO_FLAGS_portable -march=x86-64)
  endif()
  set(OCTAVO_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(OCTAVO_FLAGS_avx2_vnni ${OCTAVO_FLAGS_avx2} -mavxvnni)
  set(OCTAVO_FLAGS_avx512 ${OCTAVO_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  set(OCTAVO_FLAGS_avx512_vnni ${OCTAVO_FLAGS_avx512} -mavx512vnni)
  set(OCTAVO_FLAGS_avx512_bf16 ${OCTAVO_FLAGS_avx512_vnni} -mavx512bf16)
  set(OCTAVO_FLAGS_amx ${OCTAVO_FLAGS_avx512_bf16} -mamx-tile -mamx-int8 -mamx-bf16)
  set(OCTAVO_LEVELS portable avx2 avx2_vnni avx512 avx512_vnni avx512_bf16 amx)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    foreach(level IN LISTS OCTAVO_LEVELS)
      # GCC 12 warns of the intrinsics' undefined values in its own headers.
      list(APPEND OCTAVO_FLAGS_${level} -Wno-maybe-uninitialized -Wno-uninitialized)
    endforeach()
    # Expressions keep their order: replaced forwards, products of one row need more than 16 registers.
    list(APPEND OCTAVO_FLAGS_avx2 -fno-tree-ter)
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  # The portable level has the instructions of NEON too: OCTAVO_NEON selects the operations written for them.
  # GCC has these extensions from Armv8.2 on, and Zig has no option -march.
  if("${CMAKE_CXX_COMPILER_ARG1}" MATCHES "ziglang")
    set(without_dotprod -mcpu=generic)
    set(with_dotprod -mcpu=generic+dotprod)
  else()
    set(without_dotprod -march=armv8-a)
    set(with_dotprod -march=armv8.2-a+dotprod)
  endif()
  set(OCTAVO_FLAGS_neon ${without_dotprod} -DOCTAVO_NEON)
  set(OCTAVO_FLAGS_neon_dotprod ${with_dotprod} -DOCTAVO_NEON)
  set(OCTAVO_FLAGS_neon_i8mm ${with_dotprod}+i8mm+bf16 -DOCTAVO_NEON)
  set(OCTAVO_LEVELS portable neon neon_dotprod neon_i8mm)
endif()
