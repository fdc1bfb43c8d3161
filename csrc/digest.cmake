# A digest of the sources, which the extension keeps: by it Python tells a build that is older than the sources
# beside it (octavo/executor/native/extension.py, which computes the same).
file(GLOB sources RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}/csrc" CONFIGURE_DEPENDS
  csrc/bindings/*.cpp csrc/bindings/*.h csrc/kernels/*.cpp csrc/kernels/*.h csrc/kernels/*.inl csrc/plan/*.cpp
  csrc/plan/*.h csrc/runtime/*.cpp csrc/runtime/*.h csrc/simd/*.h)
list(SORT sources)
set(lines "")
foreach(source IN LISTS sources)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "csrc/${source}")
  file(SHA256 "${CMAKE_CURRENT_SOURCE_DIR}/csrc/${source}" digest)
  string(APPEND lines "${digest} ${source}\n")
endforeach()
string(SHA256 OCTAVO_SOURCE_DIGEST "${lines}")
set_source_files_properties(csrc/bindings/source_digest.cpp PROPERTIES
  COMPILE_DEFINITIONS "OCTAVO_SOURCE_DIGEST=\"${OCTAVO_SOURCE_DIGEST}\"")
