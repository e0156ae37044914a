/* A CUDA driver that launches nothing: it keeps what it was given, and says with an error what it was given wrongly. */
#include <stddef.h>
#include <string.h>

#define MOST 64
#define BYTES 4096
#define CONTEXT ((void *)0x700000000001)
#define FUNCTION(at) ((void *)(0x710000000000 + (at)))

struct launch {
  int function;
  unsigned grid[3], block[3], shared;
  void *stream;
  size_t size;
  unsigned char bytes[BYTES];
};

static struct launch launches[MOST];
static int count, functions, initialised, dynamic[MOST];
static void *current;
static const void *from[MOST];
static char names[MOST][64];

int fake_count(void) { return count; }
const struct launch *fake_launch(int at) { return &launches[at]; }
const char *fake_name(int function) { return names[function]; }
const void *fake_image(int function) { return from[function]; }

int cuInit(unsigned flags) {
  initialised = 1;
  return flags;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal + 40;
  return initialised ? 0 : 3;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = CONTEXT;
  return device == 40 ? 0 : 101;
}

int cuCtxSetCurrent(void *context) {
  current = context;
  return context == CONTEXT ? 0 : 201;
}

int cuGetErrorName(int code, const char **name) {
  *name = code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : code == 218 ? "CUDA_ERROR_INVALID_PTX" : "CUDA_ERROR_UNKNOWN";
  return 0;
}

int cuModuleLoadData(void **module, const void *image) {
  if (current != CONTEXT) return 201;
  if (!strstr(image, ".version ")) return 218;
  *module = (void *)image;
  return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  if (!module) return 400;
  from[functions] = module;
  strncpy(names[functions], name, 63);
  *function = FUNCTION(functions++);
  return 0;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute != 8 || value > 227 * 1024) return 1;
  dynamic[(char *)function - (char *)FUNCTION(0)] = value;
  return 0;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
  struct launch *to = &launches[count];
  const int at = (int)((char *)function - (char *)FUNCTION(0));
  if (current != CONTEXT) return 201;
  if (count >= MOST || params || at < 0 || at >= functions || shared != (unsigned)dynamic[at]) return 1;
  /* CU_LAUNCH_PARAM_BUFFER_POINTER, its value, _BUFFER_SIZE, its value, _END */
  if (extra[0] != (void *)1 || extra[2] != (void *)2 || extra[4] != (void *)0) return 1;
  to->size = *(size_t *)extra[3];
  if (to->size > BYTES) return 1;
  memcpy(to->bytes, extra[1], to->size);
  to->function = at;
  to->grid[0] = gx, to->grid[1] = gy, to->grid[2] = gz;
  to->block[0] = bx, to->block[1] = by, to->block[2] = bz;
  to->shared = shared;
  to->stream = stream;
  count++;
  return 0;
}
