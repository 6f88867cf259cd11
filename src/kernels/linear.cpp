// Matrix products with fp32 accumulation and one rounding.

#include <ATen/Version.h>

#include "fast.h"
#include "gemm.h"
#include "tensor_math.h"

namespace pgpt::kernels {
namespace {

using detail::compute_type;
using detail::is_16bit;
using detail::widen;

// oneDNN multiplies bf16 matrices at full speed with AVX-512. ATen's own loops, its choice for fp16 and for older CPUs,
// are up to a hundred times slower than sgemm on widened copies.
bool multiplies_natively(const at::Tensor& t) {
  if (t.is_cuda() || !is_16bit(t)) return true;
  static const bool avx512 = at::get_cpu_capability() == "AVX512";
  return avx512 && t.scalar_type() == at::kBFloat16;
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (multiplies_natively(a)) return at::mm(a, b);
  return at::mm(widen(a), widen(b)).to(a.scalar_type());
}

/// True when cuBLASLt has written d = (d +) scale * op(a) op(b) (+ bias).
bool through_cublaslt(const Policy& policy, const GemmOperand& a, const GemmOperand& b, const at::Tensor& bias,
                      const at::Tensor& d, double scale = 1.0, bool accumulate = false) {
  if constexpr (fast::kBuilt) {
    if (policy.gemm_algorithms != nullptr) return gemm(*policy.gemm_algorithms, a, b, bias, scale, accumulate, d);
  }
  return false;
}

/// The result of a product that cuBLASLt may compute; undefined when it is not asked to.
at::Tensor cublaslt_result(const Policy& policy, const at::Tensor& like, std::int64_t rows, std::int64_t columns,
                           at::ScalarType dtype) {
  if (policy.gemm_algorithms == nullptr || !like.is_cuda() || !is_16bit(like)) return {};
  return at::empty({rows, columns}, like.options().dtype(dtype));
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool bias_in_epilogue,
                  const Policy& policy) {
  const at::Tensor y = cublaslt_result(policy, x, x.size(0), weight.size(0), x.scalar_type());
  const bool separate_bias = bias.defined() && !bias_in_epilogue;
  if (y.defined() && through_cublaslt(policy, {x}, {weight, true}, separate_bias ? at::Tensor() : bias, y)) {
    return separate_bias ? y.add_(bias) : y;
  }
  if (!bias.defined()) return product(x, weight.t());
  if (!bias_in_epilogue) return product(x, weight.t()).add_(bias);
  if (multiplies_natively(x)) return at::addmm(bias, x, weight.t());
  return at::addmm(widen(bias), widen(x), widen(weight).t()).to(x.scalar_type());
}

at::Tensor linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight, const Policy& policy) {
  const at::Tensor dx = cublaslt_result(policy, dy, dy.size(0), weight.size(1), dy.scalar_type());
  if (dx.defined() && through_cublaslt(policy, {dy}, {weight}, {}, dx)) return dx;
  return product(dy, weight);
}

at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::ScalarType dtype,
                                  const Policy& policy) {
  const at::Tensor dw = cublaslt_result(policy, dy, dy.size(1), x.size(1), dtype);
  if (dw.defined() && through_cublaslt(policy, {dy, true}, {x}, {}, dw)) return dw;
  if (dtype == dy.scalar_type()) return product(dy.t(), x);
  if (dy.is_cuda() && is_16bit(dy) && dtype == at::kFloat) return at::mm(dy.t(), x, at::kFloat);
  return at::mm(widen(dy).t(), widen(x)).to(dtype);
}

void add_weight_gradient(at::Tensor& gradient, const at::Tensor& dy, const at::Tensor& x, double scale, bool overwrite,
                         const Policy& policy) {
  const at::ScalarType dtype = gradient.scalar_type();
  const double beta = overwrite ? 0.0 : 1.0;
  // A 16-bit gradient is the rounded product: scaling and adding come after that rounding.
  const bool one_product = dtype == at::kFloat || (scale == 1.0 && overwrite);
  if (one_product && through_cublaslt(policy, {dy, true}, {x}, {}, gradient, scale, !overwrite)) return;
  if (dy.is_cuda() && is_16bit(dy) && dtype == at::kFloat) {
    // The product's one rounding is that of alpha * sum, so scaling here equals scaling an fp32 result.
    at::addmm_out(gradient, gradient, dy.t(), x, dtype, beta, scale);
    return;
  }
  if (scale == 1.0 && dtype == compute_type(dy)) {
    gradient.addmm_(widen(dy).t(), widen(x), beta, 1.0);
    return;
  }
  at::Tensor product = linear_weight_gradient(dy, x, dtype, policy);
  if (scale != 1.0) product.mul_(scale);
  if (overwrite) {
    gradient.copy_(product);
  } else {
    gradient.add_(product);
  }
}

at::Tensor column_sum(const at::Tensor& dy) {
  if constexpr (fast::kBuilt) {
    if (auto sums = fast::column_sum(dy)) return *sums;
  }
  return at::sum(dy, {0}, false, compute_type(dy)).to(dy.scalar_type());
}

}  // namespace pgpt::kernels
