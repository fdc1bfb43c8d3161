// The digest of the sources that this library was built from, as csrc/digest.cmake computes it.
#pragma once

namespace octavo {

const char* source_digest();

}  // namespace octavo
