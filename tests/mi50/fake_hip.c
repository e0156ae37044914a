/* A HIP runtime that launches nothing: it keeps what it was given, and can be told to fail. */
#include <stddef.h>
#include <string.h>

#define MOST 64
#define BYTES 4096

struct launch {
  int function;
  unsigned grid[3], block[3], shared;
  void *stream;
  size_t size;
  unsigned char bytes[BYTES];
};

static struct launch launches[MOST];
static int count, modules, functions, fail_with;
static const void *images[MOST];
static char names[MOST][64];
static int module_of[MOST];

int fake_count(void) { return count; }
const struct launch *fake_launch(int at) { return &launches[at]; }
const void *fake_image(int function) { return images[module_of[function] - 1]; }
const char *fake_name(int function) { return names[function]; }
void fake_fail(int code) { fail_with = code; }

const char *hipGetErrorName(int code) { return code == 209 ? "hipErrorNoBinaryForGpu" : "hipErrorUnknown"; }

int hipRuntimeGetVersion(int *version) {
  *version = 60300000;
  return 0;
}

int hipModuleLoadData(void **module, const void *image) {
  if (fail_with) return fail_with;
  images[modules++] = image;
  *module = (void *)(size_t)modules;
  return 0;
}

int hipModuleGetFunction(void **function, void *module, const char *name) {
  functions++;
  module_of[functions] = (int)(size_t)module;
  strncpy(names[functions], name, 63);
  *function = (void *)(size_t)functions;
  return 0;
}

int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **params, void **extra) {
  struct launch *to = &launches[count];
  if (count >= MOST || params) return 1;
  /* HIP_LAUNCH_PARAM_BUFFER_POINTER, its value, _BUFFER_SIZE, its value, _END */
  if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != (void *)3) return 1;
  to->size = *(size_t *)extra[3];
  if (to->size > BYTES) return 1;
  memcpy(to->bytes, extra[1], to->size);
  to->function = (int)(size_t)function;
  to->grid[0] = gx, to->grid[1] = gy, to->grid[2] = gz;
  to->block[0] = bx, to->block[1] = by, to->block[2] = bz;
  to->shared = shared;
  to->stream = stream;
  count++;
  return 0;
}
