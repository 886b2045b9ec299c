// The CUDA implementation of the torch operators, through torch's stable ABI: one build serves torch 2.10 and later, any Python.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "error.h"
#include "launch.h"
#include "marlin_cutlass/sparse_layout.h"

namespace marlin_cutlass {
namespace {

using torch::stable::Tensor;

#ifdef MARLIN_CUTLASS_HOST_TEST  // the operators over host memory and a driver that records: tests/fake_driver.cpp
#define MC_NAMESPACE marlin_cutlass_host
#define MC_DISPATCH_KEY CPU
constexpr bool kHostTest = true;
#else
#define MC_NAMESPACE marlin_cutlass
#define MC_DISPATCH_KEY CUDA
constexpr bool kHostTest = false;
#endif

#define MC_TORCH(call)                                                   \
  do {                                                                   \
    if ((call) != AOTI_TORCH_SUCCESS) failed("torch refused: ", #call);  \
  } while (0)

// ---- tensors of the dispatcher --------------------------------------------------------------------------------------------------------

// An owned tensor. torch::stable::Tensor would allocate a reference count for every tensor of every call.
struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// As the operations of torch/csrc/stable/ops.h take it, where one of them is needed.
Tensor shared(const Handle& tensor) {
  AtenTensorHandle handle;
  MC_TORCH(aoti_torch_new_tensor_handle(tensor.get(), &handle));
  return Tensor(handle);
}

void* data_of(const Handle& tensor) {
  void* data = nullptr;
  MC_TORCH(aoti_torch_get_data_ptr(tensor.get(), &data));
  return data;
}

// Arguments in the order of a schema, each tensor owned as soon as it is read. By hand, because TORCH_BOX makes a Tensor of each of them. The cell of
// an optional is deleted as torch::stable::detail::to does for TORCH_TARGET of library.py; libraries for torch 2.13 and later have a function for it.
class ArgumentReader {
 public:
  explicit ArgumentReader(const StableIValue* stack) : next_(stack) {}

  Handle tensor() { return Handle(value<AtenTensorHandle>(*next_++)); }
  Handle optional_tensor() {
    const std::unique_ptr<StableIValue> present(value<StableIValue*>(*next_++));  // null for None
    return present ? Handle(value<AtenTensorHandle>(*present)) : nullptr;
  }
  int64_t integer() { return value<int64_t>(*next_++); }
  bool flag() { return value<bool>(*next_++); }

 private:
  template <class T> static T value(StableIValue from) {
    T result;
    std::memcpy(&result, &from, sizeof(T));  // little-endian: torch stores a value in the first bytes
    return result;
  }

  const StableIValue* next_;
};

// ---- what is read from a tensor -------------------------------------------------------------------------------------------------------

struct Operand {
  explicit Operand(const Handle& tensor) {
    const AtenTensorHandle handle = tensor.get();
    int64_t *size_list, *stride_list;
    MC_TORCH(aoti_torch_get_dim(handle, &dim));
    MC_TORCH(aoti_torch_get_sizes(handle, &size_list));
    MC_TORCH(aoti_torch_get_strides(handle, &stride_list));
    MC_TORCH(aoti_torch_get_dtype(handle, &dtype));
    MC_TORCH(aoti_torch_get_device_type(handle, &device_type));
    MC_TORCH(aoti_torch_get_device_index(handle, &device));
    if (kHostTest) device = 0;
    MC_TORCH(aoti_torch_get_data_ptr(handle, &data));
    sizes = size_list;
    strides = stride_list;
  }

  int64_t last_size() const { return sizes[dim - 1]; }
  int64_t last_stride() const { return strides[dim - 1]; }
  // Views the leading dimensions as one of `rows` rows at distance `stride`; false where no single stride does.
  bool as_rows(int64_t* rows, int64_t* stride) const {
    *rows = 1;
    *stride = last_size();
    for (int64_t i = dim - 2; i >= 0; --i) {
      if (sizes[i] == 1) continue;
      if (*rows == 1) *stride = strides[i];
      else if (strides[i] != *stride * *rows) return false;
      *rows *= sizes[i];
    }
    return true;
  }
  int64_t row_count() const {
    int64_t rows = 1;
    for (int64_t i = 0; i + 1 < dim; ++i) rows *= sizes[i];
    return rows;
  }

  int64_t dim = 0;
  const int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device_type = 0, device = 0;
  void* data = nullptr;
};

struct DtypeCodes {
  int32_t half = aoti_torch_dtype_float16(), bfloat16 = aoti_torch_dtype_bfloat16(), float32 = aoti_torch_dtype_float32();
  int32_t float64 = aoti_torch_dtype_float64(), uint8 = aoti_torch_dtype_uint8(), int32 = aoti_torch_dtype_int32();
  int32_t cuda = kHostTest ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
};
const DtypeCodes& codes() {
  static const DtypeCodes instance;
  return instance;
}

std::string dtype_name(int32_t dtype) {
  const DtypeCodes& c = codes();
  return dtype == c.half ? "float16" : dtype == c.bfloat16 ? "bfloat16" : dtype == c.float32 ? "float32" : dtype == c.float64 ? "float64"
       : dtype == c.uint8 ? "uint8" : dtype == c.int32 ? "int32" : concat("dtype ", dtype);
}

std::string shape_text(const Operand& t) {
  std::string text = "(";
  for (int64_t i = 0; i < t.dim; ++i) text += concat(i ? ", " : "", t.sizes[i]);
  return text + ")";
}

bool is_activation(int32_t dtype) { return dtype == codes().half || dtype == codes().bfloat16; }

// ---- checks: the same rules as marlin_cutlass/ops.py, so that a wrong size never reaches a kernel -------------------------------------

struct Form {
  int64_t n, k, group_size;
  bool zeros;
  bool sparse = false;  // 2:4-sparse: known by the size of the packed weight, which no dense one of this form has
};

std::string describe(const Form& f) { return concat("K=", f.k, ", N=", f.n, ", group_size=", f.group_size); }

int stored_group_size(const Form& f) {
  const int64_t g = f.group_size;
  if (g == 32 || g == 64 || g == 128 || g == -1) return static_cast<int>(g);
  if (g > 0 && g % kBlockDepth == 0) return kBlockDepth;
  invalid(describe(f), ": group_size=", g, " is not supported: use 32, 64, 128, a multiple of 128, or -1 (one group per column)");
}

void check_form(const Form& f) {
  if (f.n < 1 || f.k < 1) invalid(describe(f), ": K and N must be at least 1");
  if (f.n > INT32_MAX || f.k > INT32_MAX) invalid(describe(f), ": K and N must be below 2^31");
  stored_group_size(f);
  if (f.group_size > 0 && f.k % f.group_size) invalid(describe(f), ": K=", f.k, " is not a multiple of group_size=", f.group_size);
}

// What a form of gemm_compact holds (form_of in layout.py).
Form form_of(int64_t code) {
  if (code < 0) invalid("form=", code, " must not be negative: see form_of in layout.py");
  constexpr int64_t kSizes = (int64_t{1} << 30) - 1, kGroupSizes[4] = {128, 64, 32, -1};
  return {code & kSizes, code >> 30 & kSizes, kGroupSizes[code >> 60 & 3], (code >> 62 & 1) != 0};
}

void check_device(const char* name, const Operand& t, const Operand& a) {
  if (t.device_type != codes().cuda || t.device != a.device)
    invalid(name, " is not on cuda:", a.device, " like a: move one of them");
}

// A one-dimensional contiguous tensor of the weight.
void check_part(const char* name, const Operand& t, int32_t dtype, int64_t count, const Form& f, const Operand& a) {
  check_device(name, t, a);
  if (t.dtype != dtype) invalid(name, " has dtype ", dtype_name(t.dtype), ": it must be ", dtype_name(dtype));
  if (t.dim != 1 || t.sizes[0] != count) invalid(name, " has shape ", shape_text(t), ": ", describe(f), " needs (", count, ",)");
  if (count > 1 && t.strides[0] != 1) invalid(name, " is not contiguous");
}

void check_activations(const Operand& a, const Form& f) {
  if (a.device_type != codes().cuda) invalid("a is not on a CUDA device like the weight: move one of them");
  if (!is_activation(a.dtype))
    invalid("a has dtype ", dtype_name(a.dtype), ": activations must be float16 or bfloat16 (the INT4 weight serves both)");
  if (a.dim < 1 || a.last_size() != f.k)
    invalid("a has shape ", shape_text(a), ": the last dimension must be K=", f.k, " (", describe(f), ")");
}

// Whether a weight of `bytes` bytes is packed for 2:4 sparsity.
bool is_sparse(int64_t bytes, const Form& f) {
  const int group = stored_group_size(f);
  const int64_t blocks = ceil_div(f.n, kBlockColumns) * ceil_div(f.k, kBlockDepth) + kSlackBlocks;
  return !f.zeros && is_sparse_group(group) && bytes == blocks * sparse_block_bytes(group);
}

void check_weight(const Operand& packed, const Operand& scale, const Form& f, const Operand& a) {
  const int64_t n_blocks = ceil_div(f.n, kBlockColumns), blocks = n_blocks * ceil_div(f.k, kBlockDepth) + kSlackBlocks;
  const int64_t width = f.sparse ? sparse_block_bytes(stored_group_size(f)) : block_bytes(stored_group_size(f), f.zeros);
  check_part("packed", packed, codes().uint8, blocks * width, f, a);
  if (reinterpret_cast<uintptr_t>(packed.data) % 16) invalid("packed is not aligned to 16 bytes: use packed.clone()");
  check_part("col_scale", scale, codes().float32, n_blocks * kBlockColumns, f, a);
}

// ---- operands as the kernels want them ------------------------------------------------------------------------------------------------

Tensor select_columns(const Tensor& a, const Tensor& perm) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a), torch::stable::detail::from(int64_t{1}),
                                    torch::stable::detail::from(perm)};
  MC_TORCH(torch_call_dispatcher("aten::index_select", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Keeps what it points to alive until the launch.
struct Activations {
  const void* data;
  int64_t lda, k;
  std::optional<Tensor> copy;
};

bool usable(const void* data, int64_t rows, int64_t lda, int64_t k) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (rows == 1 || (lda % 8 == 0 && lda >= k));
}

// A itself where a kernel can read it, else a copy: permuted, contiguous, aligned, padded with zeros to a multiple of `k_multiple` columns.
Activations prepare(const Handle& a, const Operand& view, const Handle& perm, int64_t rows, int64_t k_multiple) {
  const int64_t k = view.last_size(), k_padded = round_up(k, k_multiple);
  int64_t found_rows, lda;
  if (!perm && k == k_padded && view.last_stride() == 1 && view.as_rows(&found_rows, &lda) && usable(view.data, rows, lda, k))
    return {view.data, rows == 1 ? k : lda, k, std::nullopt};
  Tensor t = torch::stable::reshape(shared(a), std::vector<int64_t>{rows, k});
  if (perm) t = select_columns(t, shared(perm));
  if (k != k_padded) t = torch::stable::pad(t, std::vector<int64_t>{0, k_padded - k});
  t = torch::stable::contiguous(t);
  if (!usable(t.data_ptr(), rows, k_padded, k_padded)) t = torch::stable::clone(t);
  if (!usable(t.data_ptr(), rows, k_padded, k_padded)) failed("torch allocated a tensor that is not aligned to 16 bytes");
  const void* data = t.data_ptr();
  return {data, k_padded, k_padded, std::move(t)};
}

struct Bias {
  const void* data = nullptr;
  std::optional<Tensor> copy;
};

Bias prepare_bias(const Handle& bias, const Operand& a, int64_t n) {
  if (!bias) return {};
  const Operand b(bias);
  check_device("bias", b, a);
  if (!is_activation(b.dtype) && b.dtype != codes().float32 && b.dtype != codes().float64)
    invalid("bias has dtype ", dtype_name(b.dtype), ": it must be floating point");
  if (b.dim != 1 || b.sizes[0] != n) invalid("bias has shape ", shape_text(b), ": it must be [N] = (", n, ",)");
  if (b.dtype == a.dtype && (n == 1 || b.strides[0] == 1)) return {b.data, std::nullopt};
  using torch::headeronly::ScalarType;
  Tensor t = torch::stable::contiguous(torch::stable::to(shared(bias), a.dtype == codes().half ? ScalarType::Half : ScalarType::BFloat16));
  const void* data = t.data_ptr();
  return {data, std::move(t)};
}

// ---- output ---------------------------------------------------------------------------------------------------------------------------

Handle empty_output(const Operand& a, int64_t n) {
  constexpr int64_t kSmall = 8;
  std::array<int64_t, 2 * kSmall> small;
  std::vector<int64_t> large;
  int64_t* sizes = small.data();
  if (a.dim > kSmall) sizes = (large.resize(2 * a.dim), large.data());
  int64_t* strides = sizes + a.dim;
  int64_t stride = 1;
  for (int64_t i = a.dim - 1; i >= 0; --i) {
    sizes[i] = i == a.dim - 1 ? n : a.sizes[i];
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  AtenTensorHandle handle;
  // NOTE: the direct call costs 1 us; new_empty goes through the dispatcher by name and costs 3.
  MC_TORCH(aoti_torch_empty_strided(a.dim, sizes, strides, a.dtype, a.device_type, a.device, &handle));
  return Handle(handle);
}

// True where a row-strided C could overwrite elements of A that are still to be read. Columns of one buffer may lie side by side.
bool overlaps(const void* a, int64_t lda, int64_t k, const void* c, int64_t ldc, int64_t n, int64_t m) {
  const auto *a0 = static_cast<const char*>(a), *c0 = static_cast<const char*>(c);
  const char *a1 = a0 + ((m - 1) * lda + k) * 2, *c1 = c0 + ((m - 1) * ldc + n) * 2;
  if (a1 <= c0 || c1 <= a0) return false;
  if (m == 1 || lda != ldc || lda <= 0) return true;
  const int64_t offset = ((c0 - a0) / 2 % lda + lda) % lda;
  return offset < k || offset + n > lda;
}

int64_t check_out(const Operand& out, const Operand& a, const Form& f, int64_t rows) {
  check_device("out", out, a);
  if (out.dtype != a.dtype) invalid("out has dtype ", dtype_name(out.dtype), " and a ", dtype_name(a.dtype), ": they must be equal");
  bool same = out.dim == a.dim && out.last_size() == f.n;
  for (int64_t i = 0; same && i + 1 < a.dim; ++i) same = out.sizes[i] == a.sizes[i];
  if (!same) invalid("out has shape ", shape_text(out), ": it must be the shape of a ", shape_text(a), " with N=", f.n, " for K");
  if (rows == 0) return f.n;
  int64_t found_rows, ldc;
  if (f.n > 1 && out.last_stride() != 1) invalid("out has column stride ", out.last_stride(), ": its rows must be contiguous");
  if (!out.as_rows(&found_rows, &ldc) || (rows > 1 && ldc < f.n))
    invalid("out of shape ", shape_text(out), " has no single row stride of at least N=", f.n);
  int64_t a_rows, lda;
  const bool strided = a.as_rows(&a_rows, &lda) && a.last_stride() == 1;
  if (strided && overlaps(a.data, lda, f.k, out.data, ldc, f.n, rows)) invalid("out overlaps a in memory");
  return ldc;
}

// ---- the operators --------------------------------------------------------------------------------------------------------------------

driver::Stream current_stream(int32_t device) {
  if (kHostTest) return nullptr;
  using Getter = AOTITorchError (*)(int32_t, void**);
  // Only CUDA builds of torch have the symbol, in a library that this one must not depend on.
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  if (!getter) failed("this torch has no CUDA support");
  void* stream = nullptr;
  MC_TORCH(getter(device, &stream));
  return static_cast<driver::Stream>(stream);
}

struct Arguments {
  Handle a, packed, col_scale, bias, perm;
  Form form;
  Handle out;  // of gemm_out
  int64_t variant;
  bool swiglu = false;

  int64_t columns() const { return swiglu ? form.n / 2 : form.n; }  // of the result
};

// Arguments in the order of SCHEMAS in marlin_cutlass/ops.py. From here on every tensor is freed, whatever throws.
Arguments read_arguments(const StableIValue* stack, bool with_out) {
  ArgumentReader next(stack);
  Arguments x;
  x.a = next.tensor();
  x.packed = next.tensor();
  x.col_scale = next.tensor();
  x.bias = next.optional_tensor();
  x.perm = next.optional_tensor();
  x.form.n = next.integer();
  x.form.k = next.integer();
  x.form.group_size = next.integer();
  x.form.zeros = next.flag();
  if (with_out) x.out = next.tensor();
  x.variant = next.integer();
  return x;
}

Arguments read_compact_arguments(const StableIValue* stack) {
  ArgumentReader next(stack);
  Arguments x;
  x.a = next.tensor();
  x.packed = next.tensor();
  x.col_scale = next.tensor();
  x.form = form_of(next.integer());
  x.bias = next.optional_tensor();
  x.perm = next.optional_tensor();
  x.variant = next.integer();
  return x;
}

void check_schema(uint64_t arguments, uint64_t outputs, uint64_t want_arguments, uint64_t want_outputs) {
  if (arguments != want_arguments || outputs != want_outputs)
    failed("the operator's schema has ", arguments, " arguments and ", outputs, " results, the library ", want_arguments, " and ", want_outputs);
}

void check_operands(Arguments& x, const Operand& a, const Operand& packed, const Operand& scale) {
  check_form(x.form);
  x.form.sparse = packed.dim == 1 && is_sparse(packed.sizes[0], x.form);
  check_activations(a, x.form);
  check_weight(packed, scale, x.form, a);
  if (x.swiglu && x.form.n % 4) invalid("N=", x.form.n, " must be a multiple of 4 for swiglu: two columns of the gate beside two of up");
  if (x.perm) check_part("perm", Operand(x.perm), codes().int32, x.form.k, x.form, a);
}

// Launches `step` rows at a time. A and C hold two bytes per element.
void launch_by_rows(const Call& whole, int64_t variant, int64_t step) {
  for (int64_t row = 0; row < whole.m; row += step) {
    Call part = whole;
    part.variant = variant;  // whatever the table chooses for fewer rows
    part.m = std::min(step, whole.m - row);
    part.a = static_cast<const char*>(whole.a) + row * whole.lda * 2;
    part.c = static_cast<char*>(whole.c) + row * whole.ldc * 2;
    launch(plan(part), part);
  }
}

void multiply(const Arguments& x, const Operand& a, const Operand& packed, const Operand& scale, int64_t rows, void* c, int64_t ldc) {
  if (rows > INT32_MAX) invalid("M=", rows, " must be below 2^31");
  const Bias bias = prepare_bias(x.bias, a, x.form.n);
  Call call{};
  call.packed = packed.data;
  call.col_scale = static_cast<const float*>(scale.data);
  call.bias = bias.data;
  call.c = c;
  call.ldc = ldc;
  call.m = rows;
  call.n = x.form.n;
  call.k = x.form.k;
  call.group_size = stored_group_size(x.form);
  call.dtype = a.dtype == codes().half ? 0 : 1;
  call.zeros = x.form.zeros;
  call.sparse = x.form.sparse;
  call.swiglu = x.swiglu;
  call.device = a.device;
  call.variant = x.variant;
  const Plan& chosen = plan(call);
  const Activations activations = prepare(x.a, a, x.perm, rows, chosen.k_multiple);
  call.a = activations.data;
  call.lda = activations.lda;
  call.k = activations.k;
  call.stream = current_stream(a.device);
  if (rows <= chosen.rows_per_launch) launch(chosen, call);
  else launch_by_rows(call, chosen.index, chosen.rows_per_launch);
}

// The result of an operator that returns it, in place of the arguments.
void return_product(StableIValue* stack, Arguments& x) {
  const Operand a(x.a), packed(x.packed), scale(x.col_scale);
  check_operands(x, a, packed, scale);
  const int64_t rows = a.row_count();
  Handle out = empty_output(a, x.columns());
  if (rows > 0) multiply(x, a, packed, scale, rows, data_of(out), x.columns());
  const AtenTensorHandle result = out.release();
  std::memcpy(stack, &result, sizeof(result));
}

// gemm and gemm_autograd.
void gemm(StableIValue* stack, uint64_t arguments, uint64_t outputs) {
  check_schema(arguments, outputs, 10, 1);
  Arguments x = read_arguments(stack, false);
  return_product(stack, x);
}

void gemm_swiglu(StableIValue* stack, uint64_t arguments, uint64_t outputs) {
  check_schema(arguments, outputs, 10, 1);
  Arguments x = read_arguments(stack, false);
  x.swiglu = true;
  return_product(stack, x);
}

void gemm_compact(StableIValue* stack, uint64_t arguments, uint64_t outputs) {
  check_schema(arguments, outputs, 7, 1);
  Arguments x = read_compact_arguments(stack);
  return_product(stack, x);
}

void gemm_out(StableIValue* stack, uint64_t arguments, uint64_t outputs) {
  check_schema(arguments, outputs, 11, 0);
  Arguments x = read_arguments(stack, true);
  const Operand a(x.a), packed(x.packed), scale(x.col_scale), out(x.out);
  check_operands(x, a, packed, scale);
  const int64_t rows = a.row_count();
  const int64_t ldc = check_out(out, a, x.form, rows);
  if (rows > 0) multiply(x, a, packed, scale, rows, out.data, ldc);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(MC_NAMESPACE, MC_DISPATCH_KEY, library) {
  library.impl("gemm", &gemm);
  library.impl("gemm_autograd", &gemm);
  library.impl("gemm_swiglu", &gemm_swiglu);
  library.impl("gemm_out", &gemm_out);
  library.impl("gemm_compact", &gemm_compact);
}

}  // namespace marlin_cutlass
