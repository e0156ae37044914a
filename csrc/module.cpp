// The Python module `_kernels`: reads Problem and Tensors by name, takes pointers from the buffer protocol, runs a call
// with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "calls.h"
#include "choose.h"
#include "pool.h"
#include "team.h"

namespace nb = nanobind;
using namespace attn;

namespace {

// views of Python arrays, released when the call is over
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (Py_buffer& each : held_) PyBuffer_Release(&each);
  }

  // an axis of length 1 gets stride 0: bias, keep and slopes broadcast by it, and nothing else steps along such an axis
  View view(nb::handle array, bool writable = false) {
    View v;
    if (array.is_none()) return v;
    held_.emplace_back();
    Py_buffer& b = held_.back();
    if (PyObject_GetBuffer(array.ptr(), &b, writable ? PyBUF_STRIDED : PyBUF_STRIDED_RO) != 0) {
      held_.pop_back();
      throw nb::python_error();
    }
    if (b.ndim > 4) throw nb::value_error("expected at most 4 axes");
    v.data = static_cast<char*>(b.buf);
    static char nothing;
    if (!v.data) v.data = &nothing;  // an empty array has no address, but it is not absent
    for (int axis = 0; axis < b.ndim; ++axis) {
      v.s[axis] = b.shape[axis] == 1 ? 0 : b.strides[axis];
    }
    return v;
  }

  char* data(nb::handle array, bool writable = false) { return view(array, writable).data; }

 private:
  std::vector<Py_buffer> held_;
};

template <class T>
T get(nb::handle from, const char* name) {
  return nb::cast<T>(nb::getattr(from, name));
}

Dtype dtype_of(const std::string& name) {
  if (name == "float64") return Dtype::f64;
  if (name == "bfloat16") return Dtype::bf16;
  if (name == "float16") return Dtype::f16;
  return Dtype::f32;
}

RowKind rows_kind(const std::string& name) {
  if (name == "packed") return RowKind::packed;
  if (name == "cached") return RowKind::cached;
  if (name == "paged") return RowKind::paged;
  return RowKind::dense;
}

void read_problem(nb::handle p, Args& a) {
  a.dtype = a.bias_dtype = dtype_of(get<std::string>(p, "dtype"));
  a.rows = rows_kind(get<std::string>(p, "rows"));
  a.B = get<int64_t>(p, "B");
  a.H = get<int64_t>(p, "H");
  a.Hkv = get<int64_t>(p, "Hkv");
  a.M = get<int64_t>(p, "M");
  a.N = get<int64_t>(p, "N");
  a.D = get<int64_t>(p, "D");
  a.Dv = get<int64_t>(p, "Dv");
  a.page = get<int64_t>(p, "page");
  a.left = get<int64_t>(p, "left");
  a.right = get<int64_t>(p, "right");
  a.top_left = get<bool>(p, "top_left");
  a.scale = get<double>(p, "scale");
  a.softcap = get<double>(p, "softcap");
  a.dropout_p = get<double>(p, "dropout_p");
  a.num_splits = get<int64_t>(p, "num_splits");
  const nb::tuple tokens = nb::cast<nb::tuple>(nb::getattr(p, "tokens"));
  a.total_q = nb::cast<int64_t>(tokens[0]);
  a.total_k = nb::cast<int64_t>(tokens[1]);
  const nb::object shape = nb::getattr(p, "bias_shape");
  if (shape.is_none()) return;
  a.bias_dtype = dtype_of(get<std::string>(p, "bias_dtype"));
  for (size_t axis = 0; axis < 4; ++axis) a.bias_shape[axis] = nb::cast<int64_t>(nb::cast<nb::tuple>(shape)[axis]);
}

void read_tensors(nb::handle t, Buffers& buffers, Args& a) {
  a.q = buffers.view(nb::getattr(t, "q"));
  a.k = buffers.view(nb::getattr(t, "k"));
  a.v = buffers.view(nb::getattr(t, "v"));
  a.bias = buffers.view(nb::getattr(t, "bias"));
  a.keep = buffers.view(nb::getattr(t, "keep"));
  a.slopes = buffers.view(nb::getattr(t, "alibi_slopes"));
  a.sink = buffers.view(nb::getattr(t, "sink"));
  a.bounds = buffers.view(nb::getattr(t, "bounds"));
  a.block_table = buffers.view(nb::getattr(t, "block_table"));
  a.cu_q = reinterpret_cast<const int32_t*>(buffers.data(nb::getattr(t, "cu_q")));
  a.cu_k = reinterpret_cast<const int32_t*>(buffers.data(nb::getattr(t, "cu_k")));
  a.lengths = reinterpret_cast<const int32_t*>(buffers.data(nb::getattr(t, "lengths")));
  const char* rng = buffers.data(nb::getattr(t, "rng"));
  if (rng) {
    std::memcpy(&a.seed, rng, 8);
    std::memcpy(&a.offset, rng + 8, 8);
  }
}

const Kernels& kernels_of(const std::string& simd) {
  static Choice chosen = choose_kernels("");
  if (simd.empty()) return *chosen.kernels;
  return *choose_kernels(simd).kernels;
}

// signals are for the main thread of Python; the check is a no-op on any other
bool signalled() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

template <class F>
void without_gil(F&& f) {
  bool finished;
  {
    nb::gil_scoped_release release;
    finished = f();
  }
  if (!finished) throw nb::python_error();
}

void forward(nb::handle problem, nb::handle tensors, nb::handle out, nb::handle lse, const std::string& sink_dtype,
             int threads, const std::string& simd) {
  Buffers buffers;
  Args a;
  read_problem(problem, a);
  read_tensors(tensors, buffers, a);
  a.sink_dtype = sink_dtype.empty() ? a.dtype : dtype_of(sink_dtype);
  a.out = buffers.view(out, true);
  a.lse = buffers.data(lse, true);
  const Kernels& kernels = kernels_of(simd);
  without_gil([&] { return run_forward(kernels, a, threads, signalled); });
}

// grads: (dq, dk, dv, dbias, dalibi, dsink), None where not wanted
void backward(nb::handle problem, nb::handle tensors, nb::handle out, nb::handle lse, nb::handle dout, nb::handle dlse,
              nb::tuple grads, const std::string& sink_dtype, int threads, const std::string& simd, int way) {
  Buffers buffers;
  Args a;
  read_problem(problem, a);
  read_tensors(tensors, buffers, a);
  a.sink_dtype = sink_dtype.empty() ? a.dtype : dtype_of(sink_dtype);
  a.out = buffers.view(out);
  a.lse = buffers.data(lse);
  a.dout = buffers.view(dout);
  a.dlse = buffers.view(dlse);
  a.dq = buffers.view(grads[0], true);
  a.dk = buffers.view(grads[1], true);
  a.dv = buffers.view(grads[2], true);
  a.dbias = buffers.data(grads[3], true);
  a.dslopes = buffers.data(grads[4], true);
  a.dsink = buffers.data(grads[5], true);
  const Kernels& kernels = kernels_of(simd);
  without_gil([&] { return run_backward(kernels, a, threads, signalled, BackwardWay(way)); });
}

// the pool under a microscope: calls f(item) from whatever thread runs it
void for_each(nb::callable f, int64_t items, int threads) {
  Job job;
  job.items = items;
  job.run = [&](int64_t item, char*) {
    nb::gil_scoped_acquire gil;
    f(item);
  };
  without_gil([&] { return run_job(job, threads, signalled); });
}

template <class T>
void map(nb::handle x, nb::handle y, int64_t n, void (*f)(const T*, T*, int64_t)) {
  Buffers buffers;
  f(reinterpret_cast<const T*>(buffers.data(x)), reinterpret_cast<T*>(buffers.data(y, true)), n);
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.def("forward", &forward);
  m.def("backward", &backward, nb::arg("problem"), nb::arg("tensors"), nb::arg("out"), nb::arg("lse"), nb::arg("dout"),
        nb::arg("dlse").none(), nb::arg("grads"), nb::arg("sink_dtype"), nb::arg("threads"), nb::arg("simd"),
        nb::arg("way"));
  m.def("borrow_team", &borrow_team);
  m.def("for_each", &for_each);
  m.def("targets", [] {
    nb::list names;
    for (const Kernels* each : usable_kernels()) names.append(nb::str(each->name));
    return nb::tuple(names);
  });
  m.def("choice", [](const std::string& wanted) {
    const Choice choice = choose_kernels(wanted);
    return nb::make_tuple(choice.kernels->name, choice.kernels->vector_bytes * 8, choice.why);
  });
  m.def("exp2", [](nb::handle x, nb::handle y, int64_t n, const std::string& simd) {
    map<float>(x, y, n, kernels_of(simd).exp2_f32);
  });
  m.def("exp2_f64", [](nb::handle x, nb::handle y, int64_t n, const std::string& simd) {
    map<double>(x, y, n, kernels_of(simd).exp2_f64);
  });
  m.def("tanh", [](nb::handle x, nb::handle y, int64_t n, const std::string& simd) {
    map<float>(x, y, n, kernels_of(simd).tanh_f32);
  });
}
