// Packing on the host: codes into the words of layout.py, and 4-bit fields of checkpoints into codes; and the inner loop
// of quantize/refine.py where columns are coupled.
// A library of its own, without torch and without CUDA: plain loops over bytes, which the compiler turns into vector code.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packed layout is little-endian"
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define MC_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define MC_CLONES
#endif

namespace {

constexpr int kColumns = 64, kDepth = 128, kHalf = 64, kStep = 16;
constexpr int kBytes = kColumns / 2;  // of one k: the codes of the two rows v of a lane, [atom][i][j]
constexpr int kWords = kHalf * kColumns / 8;

// The words of 64 k of one block, from rows of 64 codes `stride` bytes apart.
MC_CLONES void pack_half(const uint8_t* codes, int64_t stride, uint32_t* out) {
  uint32_t words[kStep][kBytes];  // [lane % 4][step][byte]
  for (int step = 0; step < kHalf / kStep; ++step) {
    uint16_t merged[kStep][kBytes / 2];
    for (int k = 0; k < kStep; ++k) {
      uint32_t fours[kColumns / 4];  // bytes: v 0 j 0, v 0 j 1, v 1 j 0, v 1 j 1
      std::memcpy(fours, codes + (step * kStep + k) * stride, kColumns);
      for (int i = 0; i < kColumns / 4; ++i) merged[k][i] = static_cast<uint16_t>(fours[i] | fours[i] >> 12);
    }
    uint8_t bytes[kStep][kBytes];
    std::memcpy(bytes, merged, sizeof bytes);
    for (int t = 0; t < 4; ++t) {
      const uint8_t *a = bytes[2 * t], *b = bytes[2 * t + 8], *c = bytes[2 * t + 1], *d = bytes[2 * t + 9];
      for (int i = 0; i < kBytes; ++i) {
        const uint32_t word = a[i] | uint32_t(b[i]) << 8 | uint32_t(c[i]) << 16 | uint32_t(d[i]) << 24;
        words[4 * t + step][i] = word << 2 | word >> 30;
      }
    }
  }
  for (int i = 0; i < kBytes; ++i)
    for (int part = 0; part < kStep; ++part) out[i * kStep + part] = words[part][i];
}

struct Codes {
  const uint8_t* data;
  int64_t stride, k, n;
  uint8_t fill;
};

// Words of one block; codes past the end of the matrix are `fill`.
void pack_block(const Codes& q, int64_t n_block, int64_t k_block, uint8_t* out) {
  const int64_t row = k_block * kDepth, column = n_block * kColumns;
  const uint8_t* codes = q.data + row * q.stride + column;
  int64_t stride = q.stride;
  uint8_t padded[kDepth * kColumns];
  if (row + kDepth > q.k || column + kColumns > q.n) {
    std::memset(padded, q.fill, sizeof padded);
    const int64_t rows = std::min<int64_t>(kDepth, q.k - row), width = std::min<int64_t>(kColumns, q.n - column);
    for (int64_t i = 0; i < rows; ++i) std::memcpy(padded + i * kColumns, codes + i * stride, width);
    codes = padded;
    stride = kColumns;
  }
  uint32_t words[2 * kWords];
  pack_half(codes, stride, words);
  pack_half(codes + kHalf * stride, stride, words + kWords);
  std::memcpy(out, words, sizeof words);
}

// 4-bit fields of one row of words, along the row: field i of a word is code order[i] of its eight.
MC_CLONES void unpack_along(const uint32_t* words, int64_t count, const int32_t* order, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i)
    for (int field = 0; field < 8; ++field) out[8 * i + order[field]] = words[i] >> (4 * field) & 15;
}

// ... across rows: field i of row r is row 8 r + order[i], of `count` codes.
MC_CLONES void unpack_across(const uint32_t* words, int64_t count, const int32_t* order, uint8_t* out) {
  for (int field = 0; field < 8; ++field) {
    uint8_t* row = out + order[field] * count;
    for (int64_t i = 0; i < count; ++i) row[i] = words[i] >> (4 * field) & 15;
  }
}

// a[i] += factor * b[i].
MC_CLONES void add_scaled(float* a, const float* b, float factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) a[i] += factor * b[i];
}

// run(first, last) on parts of 0..count - 1, in up to `threads` threads; fewer where the system has no more.
template <class Run>
void in_parts(int64_t count, int threads, const Run& run) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, count));
  std::vector<std::thread> others;
  int64_t first = count / parts;  // the first part is this thread's
  try {
    for (int64_t part = 1; part < parts; ++part) {
      const int64_t last = count * (part + 1) / parts;
      others.emplace_back([=, &run] { run(first, last); });
      first = last;
    }
  } catch (const std::system_error&) {
    run(first, count);
  }
  run(0, count / parts);
  for (std::thread& other : others) other.join();
}

}  // namespace

#define MC_EXPORT extern "C" __attribute__((visibility("default")))

// Code words of uint8 codes [k, n] whose rows are `stride` apart, into blocks [ceil(n/64)][ceil(k/128)] of `block_bytes`.
MC_EXPORT void mc_pack_codes(const uint8_t* codes, int64_t stride, int64_t k, int64_t n, int32_t fill, uint8_t* out,
                             int64_t block_bytes, int32_t threads) {
  const Codes q{codes, stride, k, n, static_cast<uint8_t>(fill)};
  const int64_t k_blocks = (k + kDepth - 1) / kDepth, n_blocks = (n + kColumns - 1) / kColumns;
  in_parts(k_blocks, threads, [&](int64_t first, int64_t last) {
    for (int64_t kb = first; kb < last; ++kb)
      for (int64_t nb = 0; nb < n_blocks; ++nb) pack_block(q, nb, kb, out + (nb * k_blocks + kb) * block_bytes);
  });
}

// Fields of words [rows, columns] into codes: [rows, 8 columns], or [8 rows, columns] if `across`.
MC_EXPORT void mc_unpack_fields(const uint32_t* words, int64_t rows, int64_t columns, int32_t across, const int32_t* order,
                                uint8_t* out, int32_t threads) {
  in_parts(rows, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const uint32_t* from = words + row * columns;
      uint8_t* to = out + 8 * row * columns;
      across ? unpack_across(from, columns, order, to) : unpack_along(from, columns, order, to);
    }
  });
}

// Coordinate descent, code by code, on `rows` rows of steps [rows, n] for tr(R^T H R O): hessian H [rows, rows], output O [n, n],
// gradient = (H R O) of these rows and `change`, `spread` = 0 on entry. A step changes, within low..high of its column, where it
// is free (null: everywhere). On return `change` [rows, n] is that of the weights, spread = change O.
MC_EXPORT void mc_better_codes(int64_t rows, int64_t n, const float* hessian, const float* output, float* gradient, float* steps,
                               const float* scales, const float* low, const float* high, const uint8_t* free, float* change,
                               float* spread) {
  for (int64_t i = 0; i < rows; ++i) {
    const float curvature = hessian[i * rows + i];
    float *step = steps + i * n, *slope = gradient + i * n, *moved = spread + i * n;
    bool any = false;
    for (int64_t c = 0; c < n; ++c) {
      const float scale = scales[c];
      if (scale == 0 || (free && !free[i * n + c])) continue;
      const float best = step[c] + (slope[c] / curvature - moved[c]) / output[c * n + c] / scale;
      const float rounded = std::min(std::max(std::nearbyint(best), low[c]), high[c]);
      if (rounded == step[c]) continue;
      const float by = (rounded - step[c]) * scale;
      step[c] = rounded;
      change[i * n + c] = by;
      add_scaled(moved, output + c * n, by, n);
      any = true;
    }
    if (!any) continue;
    for (int64_t j = i + 1; j < rows; ++j) add_scaled(gradient + j * n, moved, -hessian[j * rows + i], n);
  }
}
