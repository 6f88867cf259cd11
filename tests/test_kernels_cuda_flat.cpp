// The CUDA kernels of embedding, loss and flat buffers against exact values, the CPU path and themselves.

#include <cmath>
#include <limits>

#include "support/gpu_check.h"

using namespace pgpt;
using namespace pgpt::kernels;
using namespace pgpt::test;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

at::Tensor small_integers(at::IntArrayRef shape, std::uint64_t seed, at::ScalarType type) {
  return gpu((random_normal(shape, seed) * 2).round().to(type));
}

at::Tensor random_ids(std::int64_t count, std::int64_t limit, std::uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return gpu(at::randint(limit, {count}, generator, at::TensorOptions().dtype(at::kLong)));
}

void check_embedding(const at::Tensor& ids, std::int64_t rows, std::int64_t width, at::ScalarType type) {
  INFO("tokens " << ids.numel() << " rows " << rows << " width " << width << " type " << type);
  const at::Tensor table = gpu_normal({rows, width}, 1, type);
  require_same(embedding_forward(table, ids), table.index_select(0, ids));
  // Sums of small integers stay below 2^24: exact in fp32 in any order, then rounded once.
  const at::Tensor dy = small_integers({ids.numel(), width}, 2, type);
  const at::Tensor exact = at::zeros({rows, width}, dy.options().dtype(at::kDouble)).index_add_(0, ids, wide(dy));
  const at::Tensor gradient = embedding_gradient(dy, ids, rows, kFast);
  require_same(gradient, exact.to(at::kFloat).to(type));
  at::Tensor main = small_integers({rows, width}, 3, at::kFloat);
  const at::Tensor before = main.clone();
  accumulate_embedding_gradient(main, dy, ids, kFast);
  require_same(main, (wide(before) + exact.to(at::kFloat).to(type).to(at::kDouble)).to(at::kFloat));
  // Arbitrary values: the same bits each time.
  const at::Tensor random = gpu_normal({ids.numel(), width}, 4, type);
  require_same(embedding_gradient(random, ids, rows, kFast), embedding_gradient(random, ids, rows, kFast));
}

void check_cross_entropy(std::int64_t tokens, std::int64_t vocabulary, at::ScalarType type) {
  INFO("tokens " << tokens << " vocabulary " << vocabulary << " type " << type);
  poison_free_memory();
  const at::Tensor logits = gpu_normal({tokens, vocabulary}, 1, type) * 3, scale = gpu_normal({tokens}, 2, at::kFloat);
  const at::Tensor labels = random_ids(tokens, vocabulary, 3);
  at::Tensor gradient = logits.clone(), exact_gradient = wide(logits), again = logits.clone();
  const at::Tensor loss = cross_entropy_forward_backward_(gradient, labels, scale, kFast);
  const at::Tensor exact = cross_entropy_forward_backward_(exact_gradient, labels, wide(scale), kComposite);
  // Exponentials of arguments down to -30: 2 + 1.17 * 30 units of 2^-23, less than 80 roundoffs. The sum is a chain of
  // at most vocabulary / 64 vector sums and 20 more additions (at least 512 threads of 8 values). The loss is below 40.
  const double relative = (80 + static_cast<double>(vocabulary) / 64 + 20) * kRoundoff32;
  REQUIRE(loss.scalar_type() == at::kFloat);
  require_rounded(loss, exact, relative + 4 * kRoundoff32 * 40);
  const at::Tensor size = exact_gradient.abs();
  require_rounded(gradient, exact_gradient, size, 2 * relative * 5);
  require_relative(gradient, exact_gradient, roundoff(type) + 2 * relative);
  require_same(cross_entropy_forward(logits, labels, kFast), loss);
  require_same(cross_entropy_forward_backward_(again, labels, scale, kFast), loss);
  require_same(again, gradient);
}

// Segments with gaps, edges that are no multiple of 4, a tiny one, an empty one and a long one; the last is a
// duplicate.
std::vector<Segment> segment_list(std::int64_t size) {
  return {{0, 1000, 0, 1.0F, 1.0F},    {1024, 1027, 1, 0.0F, 1.0F},  {1027, 1027, 0, 1.0F, 1.0F},
          {1029, 3074, 1, 0.5F, 1.0F}, {3074, 70001, 0, 1.0F, 1.0F}, {70016, 70017, 2, 0.0F, 0.0F},
          {70080, size, 2, 1.0F, 0.0F}};
}

}  // namespace

TEST_CASE("CUDA embedding gradients are exact sums for every pattern of ids", "[gpu]") {
  if (!at::hasCUDA()) return;
  poison_free_memory();
  const auto ids_options = at::TensorOptions().dtype(at::kLong).device(at::kCUDA);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const std::int64_t tokens : {1, 31, 32, 33, 64, 65, 1000}) {
      check_embedding(random_ids(tokens, 5, 1), 5, 72, type);
      check_embedding(random_ids(tokens, 1000, 2), 1000, 8, type);
      check_embedding(at::zeros({tokens}, ids_options), 3, 64, type);
      check_embedding(at::arange(tokens, ids_options), tokens, 264, type);
    }
    // Runs of every length around the stretch of 32 tokens.
    check_embedding(at::arange(3000, ids_options).sqrt().to(at::kLong), 60, 2056, type);
    check_embedding(random_ids(9000, 50304, 3), 50304, 256, type);
    check_embedding(at::cat({random_ids(2000, 2, 4), random_ids(3000, 4000, 5)}), 4000, 4096, type);
  }
}

TEST_CASE("ids and labels outside the table give NaN and touch no memory of others", "[gpu]") {
  if (!at::hasCUDA()) return;
  const at::Tensor ids = gpu(at::tensor(std::vector<std::int64_t>{2, -1, 5, 4}, at::kLong));
  const at::Tensor table = gpu_normal({5, 16}, 1, at::kBFloat16), rows = embedding_forward(table, ids);
  require_same(rows[0], table[2]);
  require_same(rows[3], table[4]);
  CHECK(rows.slice(0, 1, 3).isnan().all().item<bool>());
  const at::Tensor gradient = embedding_gradient(at::ones({4, 16}, table.options()), ids, 5, kFast);
  CHECK(gradient.sum().item<double>() == 32);
  at::Tensor logits = gpu_normal({4, 5}, 2, at::kFloat);
  const at::Tensor loss = cross_entropy_forward(logits, ids, kFast);
  CHECK(loss.isnan().to(at::kLong).sum().item<std::int64_t>() == 2);
  CHECK(loss[0].isfinite().item<bool>());
}

TEST_CASE("CUDA cross entropy matches exact values for every vocabulary", "[gpu]") {
  if (!at::hasCUDA()) return;
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const std::int64_t vocabulary :
         {1, 3, 7, 8, 9, 128, 1000, 4097, 32000, 50257, 50304, 57352, 65537, 128256, 262144, 262149}) {
      for (const std::int64_t tokens : {1, 7}) check_cross_entropy(tokens, vocabulary, type);
    }
    check_cross_entropy(700, 2051, type);
  }
}

TEST_CASE("CUDA cross entropy stands extreme logits", "[gpu]") {
  if (!at::hasCUDA()) return;
  const float infinity = std::numeric_limits<float>::infinity();
  at::Tensor logits =
      gpu(at::tensor(std::vector<float>{3e4F, -3e4F, 0, 1, -infinity, 2, -infinity, 1, kNan, 0, 0, 0}, at::kFloat)
              .view({3, 4}));
  const at::Tensor labels = gpu(at::tensor(std::vector<std::int64_t>{0, 1, 2}, at::kLong)),
                   scale = at::ones({3}, logits.options());
  const at::Tensor loss = cross_entropy_forward_backward_(logits, labels, scale, kFast).cpu();
  CHECK(loss[0].item<float>() == 0.0F);
  // log(1 + exp(1 - 2)) of the two finite logits, to a few roundoffs.
  CHECK(std::abs(loss[1].item<double>() - std::log1p(std::exp(-1.0))) < 8 * kRoundoff32);
  CHECK(std::isnan(loss[2].item<float>()));
  CHECK(logits.slice(0, 0, 2).isfinite().all().item<bool>());
  CHECK(logits[1][0].item<float>() == 0.0F);
}

TEST_CASE("CUDA optimizer steps give the bits of the CPU path", "[gpu]") {
  if (!at::hasCUDA()) return;
  for (const std::int64_t size : {70081, 200000, 262144}) {
    const SegmentTable host = make_segment_table(segment_list(size), at::kCPU);
    const SegmentTable device = make_segment_table(segment_list(size), at::Device(at::kCUDA, 0));
    for (const at::ScalarType weight_type : {at::kBFloat16, at::kHalf, at::kFloat}) {
      for (const at::ScalarType gradient_type : {at::kFloat, at::kBFloat16, at::kHalf}) {
        for (const float skip : {0.0F, 1.0F}) {
          INFO("size " << size << " weights " << weight_type << " gradients " << gradient_type << " skip " << skip);
          const StepScalars scalars{at::tensor(
              std::vector<float>{0.37F, skip, 0.1F, 0.001F, 0.1F, 1, 1e-3F, 2e-3F, 3e-2F, 0, 0, 0}, at::kFloat)};
          StepScalars device_scalars{gpu(scalars.values)};
          at::Tensor p = random_normal({size}, 1).to(at::kFloat), m = random_normal({size}, 2).to(at::kFloat);
          at::Tensor v = random_normal({size}, 3).abs().to(at::kFloat), g = random_normal({size}, 4).to(gradient_type);
          g.slice(0, 0, size, 7).zero_();
          at::Tensor gp = gpu(p), gm = gpu(m), gv = gpu(v), gg = gpu(g);
          const bool own = weight_type == at::kFloat && size == 200000;
          at::Tensor w = own ? p : p.to(weight_type, false, true), gw = own ? gp : gp.to(weight_type, false, true);
          const auto compare = [&] {
            require_equal(gw.cpu(), w);
            require_equal(gp.cpu(), p);
            require_equal(gm.cpu(), m);
            require_equal(gv.cpu(), v);
            require_equal(gg.cpu(), g);
          };
          const AdamOptions adam{0.9F, 0.95F, 1e-8F};
          for (int step = 0; step < 2; ++step) {
            adam_step(w, p, m, v, g, host, adam, scalars, kFast);
            adam_step(gw, gp, gm, gv, gg, device, adam, device_scalars, kFast);
          }
          compare();
          for (const float first : {1.0F, 0.0F}) {
            scalars.values[StepScalars::kFirstMomentum].fill_(first);
            device_scalars.values[StepScalars::kFirstMomentum].fill_(first);
            sgd_step(w, p, m, g, host, 0.9, scalars, kFast);
            sgd_step(gw, gp, gm, gg, device, 0.9, device_scalars, kFast);
          }
          compare();
        }
      }
    }
  }
}

TEST_CASE("CUDA norms and counts of flat buffers agree with the CPU path", "[gpu]") {
  if (!at::hasCUDA()) return;
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t size : {70081, 5000003}) {
      INFO("type " << type << " size " << size);
      std::vector<Segment> list = segment_list(size);
      list.back().norm_weight = size > 100000 ? 1.0F : 0.0F;
      const SegmentTable host = make_segment_table(list, at::kCPU),
                         device = make_segment_table(list, at::Device(at::kCUDA, 0));
      at::Tensor flat = random_normal({size}, 1).to(type);
      flat.slice(0, 990, 1026).zero_();
      flat.slice(0, 60000, 60003).zero_();
      for (const auto& [begin, end] :
           {std::pair<std::int64_t, std::int64_t>{1000, 1024}, {1027, 1029}, {70001, 70080}}) {
        flat.slice(0, begin, end).fill_(kNan);  // in no counted segment
      }
      const at::Tensor on_gpu = gpu(flat), norm = squared_norm(on_gpu, device, kFast);
      const double expected = squared_norm(flat, host, kFast).item<double>();
      REQUIRE(norm.scalar_type() == at::kDouble);
      // fp64 sums of positive terms in two orders: a roundoff an addition on either side.
      CHECK(std::abs(norm.item<double>() - expected) <= 2 * expected * static_cast<double>(size) * kRoundoff64);
      require_same(squared_norm(on_gpu, device, kFast), norm);
      CHECK(count_zeros(on_gpu, device).item<std::int64_t>() == count_zeros(flat, host).item<std::int64_t>());
      CHECK(has_non_finite(on_gpu).item<float>() == 1.0F);
    }
    for (const std::int64_t size : {1, 7, 8, 9, 1000003}) {
      at::Tensor flat = gpu_normal({size}, 2, type);
      CHECK(has_non_finite(flat).item<float>() == 0.0F);
      for (const std::int64_t place : {std::int64_t{0}, size / 2, size - 1}) {
        for (const double bad : {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
          at::Tensor spoiled = flat.clone();
          spoiled[place].fill_(bad);
          CHECK(has_non_finite(spoiled).item<float>() == 1.0F);
        }
      }
    }
  }
}

TEST_CASE("a table of many segments is searched right", "[gpu]") {
  if (!at::hasCUDA()) return;
  // Powers of two plus one straddle the 32-way search.
  for (const std::int64_t count : {1, 31, 32, 33, 65, 1025, 3000}) {
    std::vector<Segment> list;
    for (std::int64_t i = 0; i < count; ++i)
      list.push_back({i * 70, i * 70 + 64, static_cast<std::int32_t>(i % 3), 1.0F, i % 2 == 0 ? 1.0F : 0.0F});
    const SegmentTable device = make_segment_table(list, at::Device(at::kCUDA, 0));
    const at::Tensor ones = at::ones({count * 70}, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA));
    CHECK(squared_norm(ones, device, kFast).item<double>() == static_cast<double>(64 * ((count + 1) / 2)));
    CHECK(count_zeros(ones - 1, device).item<std::int64_t>() == 64 * ((count + 1) / 2));
  }
}

TEST_CASE("the clip coefficient and the stop flag are the same on both devices", "[gpu]") {
  if (!at::hasCUDA()) return;
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double squared : {0.0, 0.25, 7.3, 1e30, infinity, static_cast<double>(kNan)}) {
    for (const double clip : {0.0, 1.0, 2.5}) {
      for (const double guard : {0.0, infinity, static_cast<double>(kNan)}) {
        for (const float skip : {0.0F, StepScalars::kJustStopped, StepScalars::kStoppedBefore}) {
          INFO("squared " << squared << " clip " << clip << " guard " << guard << " skip " << skip);
          const at::Tensor sum = at::full({}, squared, at::kDouble);
          const at::Tensor also = at::full({}, guard, at::kDouble);
          StepScalars host{at::full({10}, 5.0F, at::kFloat)};
          host.values.select(0, StepScalars::kSkip).fill_(skip);
          StepScalars device{gpu(host.values)};
          at::Tensor norm = at::zeros({}, at::kFloat), device_norm = gpu(norm);
          finish_norm(sum, clip, also, norm, host);
          finish_norm(gpu(sum), clip, gpu(also), device_norm, device);
          CHECK(at::allclose(device.values.cpu(), host.values, 0, 0, true));
          CHECK(at::allclose(device_norm.cpu(), norm, 0, 0, true));
        }
      }
    }
  }
}

TEST_CASE("the gradients that stopped a run are marked on the GPU as on the CPU", "[gpu]") {
  if (!at::hasCUDA()) return;
  std::vector<Segment> list;
  for (std::int64_t i = 0; i < 1500; ++i) list.push_back({i * 70, i * 70 + 65});
  at::Tensor flat = at::randn({1500 * 70}, at::kFloat);
  for (const std::int64_t place : {0L, 70L * 3 + 64, 70L * 1499 + 1, 70L * 7 + 66})
    flat[place] = kNan;  // the last lies in a gap
  StepScalars host{at::full({10}, StepScalars::kJustStopped, at::kFloat)}, device{gpu(host.values)};
  at::Tensor flags = at::zeros({1500}, at::kByte), device_flags = gpu(flags);
  mark_non_finite(flat, make_segment_table(list, at::kCPU), host, flags);
  mark_non_finite(gpu(flat), make_segment_table(list, at::Device(at::kCUDA, 0)), device, device_flags);
  CHECK(flags.sum().item<int>() == 3);
  CHECK(at::equal(device_flags.cpu(), flags));
  CHECK(at::equal(device.values.cpu(), host.values));
}
