// Files read and written without the page cache: O_DIRECT on Linux, F_NOCACHE on macOS.
#pragma once

#include <fcntl.h>
#include <unistd.h>

namespace octavo {

// Makes reads and writes of an open file bypass the page cache. Returns false with errno set if the file
// system does not support it.
inline bool set_direct(int file) {
#ifdef O_DIRECT
    const int flags = fcntl(file, F_GETFL);
    return flags >= 0 && fcntl(file, F_SETFL, flags | O_DIRECT) == 0;
#else
    return fcntl(file, F_NOCACHE, 1) == 0;
#endif
}

// Opens a file for reading without the page cache. Returns its descriptor, or -1 with errno set: EINVAL if the
// file system does not support it.
inline int open_direct(const char* path) {
#ifdef O_DIRECT
    return open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
#else
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0) set_direct(file);
    return file;
#endif
}

}  // namespace octavo
