/* Stands in for the driver below the Hopper launcher: writes what it is asked to do to stdout, one line per call. */
#include <stdint.h>
#include <stdio.h>
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

/* parameters as the Hopper forward kernel with one map, two pointers, one float and one integer has them */
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **p, void **extra) {
  printf("launch %lx %u %u %u %u %u %lx", (unsigned long)(uintptr_t)function, x, y, z, threads, shared,
         (unsigned long)(uintptr_t)stream);
  printf(" aligned %d byte %d", (int)((uintptr_t)p[0] % 64), ((unsigned char *)p[0])[127]);
  for (int i = 1; i < 5; i++) printf(" %d", *(int32_t *)p[i]);
  for (int i = 5; i < 9; i++) printf(" %ld", (long)*(int64_t *)p[i]);
  printf(" %lx %lx %g %d %lx %lx\n", (unsigned long)*(uint64_t *)p[9], (unsigned long)*(uint64_t *)p[10],
         *(float *)p[11], *(int32_t *)p[12], (unsigned long)*(uint64_t *)p[13], (unsigned long)*(uint64_t *)p[14]);
  fflush(stdout);
  return extra != 0;
}
