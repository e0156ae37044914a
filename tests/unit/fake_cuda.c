/* Stands in for the driver below the Hopper launcher: writes what it is asked to do to stdout, one line per call. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *length,
                           const uint64_t *bytes, const uint32_t *box, const uint32_t *step, int interleave, int swizzle,
                           int promotion, int fill) {
  memset(map, (int)(uintptr_t)address & 255, 128);
  printf("map %d %d %d %d", type, swizzle, interleave, fill);
  for (uint32_t i = 0; i < rank; i++) printf(" %lu", (unsigned long)length[i]);
  for (uint32_t i = 0; i + 1 < rank; i++) printf(" %lu", (unsigned long)bytes[i]);
  for (uint32_t i = 0; i < rank; i++) printf(" %u", box[i]);
  printf("\n");
  return (uintptr_t)address == 0xdead00 ? 1 : 0;
}

/* FAKE_PARAMETERS has a letter per parameter: m(ap), i(nt32), l (64 bits), f(loat) */
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **p, void **extra) {
  printf("launch %lx %u %u %u %u %u %lx", (unsigned long)(uintptr_t)function, x, y, z, threads, shared,
         (unsigned long)(uintptr_t)stream);
  for (const char *kind = getenv("FAKE_PARAMETERS"); *kind; kind++, p++) {
    if (*kind == 'm') printf(" m%d,%d", (int)((uintptr_t)*p % 64), ((unsigned char *)*p)[127]);
    if (*kind == 'i') printf(" %d", *(int32_t *)*p);
    if (*kind == 'l') printf(" %ld", (long)*(int64_t *)*p);
    if (*kind == 'f') printf(" %g", *(float *)*p);
  }
  printf("\n");
  fflush(stdout);
  return extra != 0;
}
