/* One launch of a compiled kernel in one call: tensor maps are encoded from addresses, everything else is in the plan.

   The bytes of a plan are made by launcher.py: a Head, n_maps Maps, n_numbers 32-bit numbers. A kernel's parameters are,
   in order: for each map the map, its shape and its strides; plain pointers; numbers; two scratch pointers, unused. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include "cuda.h"

enum { RANK = 5, MAX_MAPS = 8, MAX_POINTERS = 16, MAX_NUMBERS = 64 };

typedef struct {
  uint64_t function;
  uint32_t programs, threads, shared, n_maps, n_pointers, n_numbers, unused[2];
} Head;

typedef struct {
  /* each with rank entries in front, zeros behind */
  uint64_t length[RANK];       /* innermost first, as the driver wants them */
  uint64_t bytes[RANK - 1];    /* strides */
  int64_t stride[RANK];        /* outermost first, in elements, as the kernel wants them */
  int32_t shape[RANK];
  uint32_t box[RANK];
  int32_t type, swizzle, rank, unused;
} Map;

typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
typedef CUresult (*Launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                           void **, void **);

static Encode encode;
static Launch launch_kernel;

/* launch(plan, stream, address of each map, then each pointer) */
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
  static const cuuint32_t one[RANK] = {1, 1, 1, 1, 1};
  CUtensorMap maps[MAX_MAPS] __attribute__((aligned(64)));
  uint64_t address[MAX_MAPS + MAX_POINTERS], scratch[2] = {0, 0};
  void *parameters[MAX_MAPS * (1 + 2 * RANK) + MAX_POINTERS + MAX_NUMBERS + 2];
  int count = 0;

  if (n_args < 2 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) < (Py_ssize_t)sizeof(Head)) {
    PyErr_SetString(PyExc_TypeError, "launch: expected a plan, a stream and addresses");
    return NULL;
  }
  const char *bytes = PyBytes_AS_STRING(args[0]);
  Head *head = (Head *)bytes;
  uint64_t need = sizeof(Head) + (uint64_t)head->n_maps * sizeof(Map) + (uint64_t)head->n_numbers * 4;
  if ((uint64_t)PyBytes_GET_SIZE(args[0]) != need || head->n_maps > MAX_MAPS || head->n_pointers > MAX_POINTERS ||
      head->n_numbers > MAX_NUMBERS || n_args != 2 + (Py_ssize_t)(head->n_maps + head->n_pointers)) {
    PyErr_SetString(PyExc_TypeError, "launch: the plan does not fit the arguments");
    return NULL;
  }
  Map *map = (Map *)(bytes + sizeof(Head));
  uint32_t *numbers = (uint32_t *)(map + head->n_maps);
  for (uint32_t i = 0; i < head->n_maps + head->n_pointers; i++)
    address[i] = PyLong_AsUnsignedLongLongMask(args[2 + i]);
  CUstream stream = (CUstream)(uintptr_t)PyLong_AsUnsignedLongLongMask(args[1]);
  if (PyErr_Occurred()) return NULL;

  for (uint32_t i = 0; i < head->n_maps; i++, map++) {
    if (map->rank < 1 || map->rank > RANK) {
      PyErr_SetString(PyExc_TypeError, "launch: a map has more axes than the driver knows");
      return NULL;
    }
    CUresult failed = encode(&maps[i], (CUtensorMapDataType)map->type, map->rank, (void *)(uintptr_t)address[i], map->length,
                             map->bytes, map->box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapSwizzle)map->swizzle,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (failed) return PyErr_Format(PyExc_RuntimeError, "tensor map %u: driver error %d", i, (int)failed);
    parameters[count++] = &maps[i];
    for (int axis = 0; axis < map->rank; axis++) parameters[count++] = &map->shape[axis];
    for (int axis = 0; axis < map->rank; axis++) parameters[count++] = &map->stride[axis];
  }
  for (uint32_t i = 0; i < head->n_pointers; i++) parameters[count++] = &address[head->n_maps + i];
  for (uint32_t i = 0; i < head->n_numbers; i++) parameters[count++] = &numbers[i];
  parameters[count++] = &scratch[0];
  parameters[count++] = &scratch[1];

  CUresult failed;
  Py_BEGIN_ALLOW_THREADS;
  failed = launch_kernel((CUfunction)(uintptr_t)head->function, head->programs, 1, 1, head->threads, 1, 1, head->shared,
                         stream, parameters, NULL);
  Py_END_ALLOW_THREADS;
  if (failed) return PyErr_Format(PyExc_RuntimeError, "launch: driver error %d", (int)failed);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(plan, stream, *addresses)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "attnproof_launcher", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_attnproof_launcher(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver) {
    encode = (Encode)dlsym(driver, "cuTensorMapEncodeTiled");
    launch_kernel = (Launch)dlsym(driver, "cuLaunchKernel");
  }
  if (!encode || !launch_kernel) {
    PyErr_SetString(PyExc_ImportError, "libcuda.so.1 has no cuTensorMapEncodeTiled");
    return NULL;
  }
  return PyModule_Create(&module);
}
