// Matrix products with fp32 accumulation and one rounding.

#include <ATen/Version.h>

#include "fast.h"
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

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool bias_in_epilogue) {
  if (!bias.defined()) return product(x, weight.t());
  if (!bias_in_epilogue) return product(x, weight.t()).add_(bias);
  if (multiplies_natively(x)) return at::addmm(bias, x, weight.t());
  return at::addmm(widen(bias), widen(x), widen(weight).t()).to(x.scalar_type());
}

at::Tensor linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight) { return product(dy, weight); }

at::Tensor linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::ScalarType dtype) {
  if (dtype == dy.scalar_type()) return product(dy.t(), x);
  if (dy.is_cuda() && is_16bit(dy) && dtype == at::kFloat) return at::mm(dy.t(), x, at::kFloat);
  return at::mm(widen(dy).t(), widen(x)).to(dtype);
}

void accumulate_weight_gradient(at::Tensor& main_gradient, const at::Tensor& dy, const at::Tensor& x) {
  if (dy.is_cuda() && is_16bit(dy)) {
    at::addmm_out(main_gradient, main_gradient, dy.t(), x, main_gradient.scalar_type());
    return;
  }
  PGPT_ASSERT(main_gradient.scalar_type() == compute_type(dy), "main gradient type ", main_gradient.scalar_type());
  main_gradient.addmm_(widen(dy).t(), widen(x));
}

at::Tensor column_sum(const at::Tensor& dy) {
  if constexpr (fast::kBuilt) {
    if (auto sums = fast::column_sum(dy)) return *sums;
  }
  return at::sum(dy, {0}, false, compute_type(dy)).to(dy.scalar_type());
}

}  // namespace pgpt::kernels
