#include "source_digest.h"

namespace octavo {

const char* source_digest() { return OCTAVO_SOURCE_DIGEST; }

}  // namespace octavo
