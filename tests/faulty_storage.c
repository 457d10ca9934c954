/* Storage that fails: loaded by LD_PRELOAD, it lets file operations below a folder fail.
 *
 * FAULTY_FOLDER is the folder, FAULTY_CONTROL a file that tests map, too (tests/faulty_storage.py).
 * Operations are counted from 1; those with numbers from `first` to `last` fail with `error` and do
 * nothing. It sees what Python and what C++ libraries do alike.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct control {
  long long counted, first, last, error, failed;
};

static struct control *control;
static const char *folder;
static size_t length;
static unsigned char is_below[1 << 16]; /* of each open file */

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("FAULTY_CONTROL");
  folder = getenv("FAULTY_FOLDER");
  if (!file || !folder) return;
  length = strlen(folder);
  int fd = (int)open(file, O_RDWR);
  if (fd < 0) abort();
  void *page = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (page == MAP_FAILED) abort();
  control = page;
}

static int path_is_below(int at, const char *path) {
  if (!control || !path) return 0;
  if (path[0] == '/') return !strncmp(path, folder, length);
  return at >= 0 && at < (1 << 16) && is_below[at];
}

static int file_is_below(int fd) {
  return control && fd >= 0 && fd < (1 << 16) && is_below[fd];
}

/* Whether the operation that comes now is to fail; errno is then set. */
static int fails(void) {
  if (!control->last) return 0;
  long long number = __atomic_add_fetch(&control->counted, 1, __ATOMIC_SEQ_CST);
  if (number < control->first || number > control->last) return 0;
  __atomic_add_fetch(&control->failed, 1, __ATOMIC_SEQ_CST);
  errno = (int)control->error;
  return 1;
}

#define FAIL_IF(below) \
  if ((below) && fails()) return -1

static int opened(int fd, int below) {
  if (fd >= 0 && fd < (1 << 16)) is_below[fd] = (unsigned char)below;
  return fd;
}

static mode_t mode_of(int flags, va_list rest) {
  return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = mode_of(flags, rest); \
    va_end(rest); \
    int below = path_is_below(-1, path); \
    FAIL_IF(below); \
    return opened(real(path, flags, mode), below); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int at, const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = mode_of(flags, rest); \
    va_end(rest); \
    int below = path_is_below(at, path); \
    FAIL_IF(below); \
    return opened(real(at, path, flags, mode), below); \
  }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
  REAL(close);
  if (fd >= 0 && fd < (1 << 16)) is_below[fd] = 0;
  return real(fd);
}

#define ON_FILE(type, name, declared, given) \
  type name declared { \
    REAL(name); \
    FAIL_IF(file_is_below(fd)); \
    return real given; \
  }
ON_FILE(ssize_t, read, (int fd, void *to, size_t count), (fd, to, count))
ON_FILE(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
ON_FILE(ssize_t, write, (int fd, const void *from, size_t count), (fd, from, count))
ON_FILE(ssize_t, pwrite, (int fd, const void *from, size_t n, off_t at), (fd, from, n, at))
ON_FILE(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
ON_FILE(ssize_t, writev, (int fd, const struct iovec *from, int count), (fd, from, count))
ON_FILE(int, fsync, (int fd), (fd))
ON_FILE(int, fdatasync, (int fd), (fd))
ON_FILE(int, ftruncate, (int fd, off_t size), (fd, size))
ON_FILE(int, ftruncate64, (int fd, off64_t size), (fd, size))

#define ON_PATH(name, declared, given) \
  int name declared { \
    REAL(name); \
    FAIL_IF(path_is_below(at, path)); \
    return real given; \
  }
#define ON_NAME(name, declared, given) \
  int name declared { \
    REAL(name); \
    FAIL_IF(path_is_below(-1, path)); \
    return real given; \
  }
ON_NAME(mkdir, (const char *path, mode_t mode), (path, mode))
ON_NAME(rmdir, (const char *path), (path))
ON_NAME(unlink, (const char *path), (path))
ON_NAME(rename, (const char *path, const char *new), (path, new))
ON_PATH(mkdirat, (int at, const char *path, mode_t mode), (at, path, mode))
ON_PATH(unlinkat, (int at, const char *path, int flags), (at, path, flags))
ON_PATH(renameat, (int at, const char *path, int to, const char *new), (at, path, to, new))
