// Squeeze-and-excite of images in one pass: means, two small layers, gates, and what follows them.
//
//   y = Function(x * sigmoid(excite relu(squeeze mean(x) + b1) + b2) + residual) + offset
//
//   x, residual, y  (count, pixels, channels) where nhwc, else (count, channels, pixels); y is =
//   squeeze, excite (hidden, channels): rows of the first layer, columns of the second
//   scratch         count * (channels + hidden) floats
//
// Null for a bias or the residual leaves it out; `applies` says whether there is the function. NaN
// stays NaN. Deterministic: each element is made by one thread in a fixed order.

#include <cstddef>
#include <cstring>

#include "cpu/functions.hpp"

namespace {

struct Sizes {
  int count, pixels, channels, hidden, nhwc;
};

// A thread takes so many channels of an image: with few images each is shared among threads.
constexpr int kChannels = 32;
// Sums of a loop are kept apart, so that the compiler may use whole registers for them.
constexpr int kSums = 16;

// exp by powers of two and a polynomial on [-ln 2 / 2, ln 2 / 2]; relative error below 2e-7. The
// compiler makes vectors of it, which it cannot of the library's.
// Above 88 it is infinite, as the framework's: infinity times a gate of exactly 0 is NaN.
inline float exp_of(float to) {
  float x = to > 88.0f ? 88.0f : to;
  x = x < -87.0f ? -87.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the integer is in the lowest bits
  const float shifted = x * 1.44269504f + kRound;
  const float whole = shifted - kRound;
  const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  unsigned bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127u) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return to > 88.0f ? __builtin_inff() : p * power;
}

float sum(const float* values, int count, const float* factors) {
  float sums[kSums] = {};
  int i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int j = 0; j < kSums; ++j) {
      sums[j] += factors == nullptr ? values[i + j] : values[i + j] * factors[i + j];
    }
  }
  for (int j = 0; i < count; ++i, ++j) {
    sums[j] += factors == nullptr ? values[i] : values[i] * factors[i];
  }
  for (int width = kSums / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

// The means of some channels of an image that starts at `x`.
void find_means(const Sizes& s, const float* x, int first, int channels, float* means) {
  const float part = 1.0f / s.pixels;
  float sums[kChannels] = {};
  if (s.nhwc) {
    for (int p = 0; p < s.pixels; ++p) {
      const float* const pixel = x + size_t(p) * s.channels + first;
      for (int c = 0; c < channels; ++c) sums[c] += pixel[c];
    }
  } else {
    for (int c = 0; c < channels; ++c) {
      sums[c] = sum(x + size_t(first + c) * s.pixels, s.pixels, nullptr);
    }
  }
  for (int c = 0; c < channels; ++c) means[first + c] = sums[c] * part;
}

void find_gates(const Sizes& s, const float* hidden, const float* excite, const float* bias,
                int first, int channels, float* gates) {
  for (int c = 0; c < channels; ++c) gates[c] = bias == nullptr ? 0.0f : bias[first + c];
  for (int h = 0; h < s.hidden; ++h) {
    const float* const row = excite + size_t(h) * s.channels + first;
    for (int c = 0; c < channels; ++c) gates[c] += hidden[h] * row[c];
  }
  for (int c = 0; c < channels; ++c) gates[c] = 1.0f / (1.0f + exp_of(-gates[c]));
}

inline float finished(float value, bool applies, float offset) {
  return (applies ? plantune::Function::of(value) : value) + offset;
}

// Some channels of an image, its residual (or null) and its result.
void apply(const Sizes& s, const float* gates, const float* x, const float* residual, bool applies,
           float offset, int first, int channels, float* y) {
  // A step over pixels or over channels; the inner loop runs along memory.
  const int rows = s.nhwc ? s.pixels : channels, columns = s.nhwc ? channels : s.pixels;
  for (int row = 0; row < rows; ++row) {
    const size_t place = s.nhwc ? size_t(row) * s.channels + first : size_t(first + row) * s.pixels;
    for (int i = 0; i < columns; ++i) {
      const float other = residual == nullptr ? 0.0f : residual[place + i];
      const float gated = x[place + i] * gates[s.nhwc ? i : row] + other;
      y[place + i] = finished(gated, applies, offset);
    }
  }
}

}  // namespace

extern "C" void squeeze_excite(const Sizes* sizes, const float* x, const float* squeeze,
                               const float* squeeze_bias, const float* excite,
                               const float* excite_bias, const float* residual, int applies,
                               float offset, float* y, float* scratch) {
  const Sizes s = *sizes;
  const int parts = (s.channels + kChannels - 1) / kChannels;
  const size_t image = size_t(s.pixels) * s.channels;
  float* const means = scratch;
  float* const hidden = scratch + size_t(s.count) * s.channels;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int task = 0; task < s.count * parts; ++task) {
      const int n = task / parts, first = task % parts * kChannels;
      const int channels = s.channels - first < kChannels ? s.channels - first : kChannels;
      find_means(s, x + n * image, first, channels, means + size_t(n) * s.channels);
    }
#pragma omp for schedule(static)
    for (int task = 0; task < s.count * s.hidden; ++task) {
      const int n = task / s.hidden, h = task % s.hidden;
      const float* const row = squeeze + size_t(h) * s.channels;
      const float value = sum(means + size_t(n) * s.channels, s.channels, row) +
                          (squeeze_bias == nullptr ? 0.0f : squeeze_bias[h]);
      hidden[task] = value < 0.0f ? 0.0f : value;
    }
#pragma omp for schedule(static)
    for (int task = 0; task < s.count * parts; ++task) {
      const int n = task / parts, first = task % parts * kChannels;
      const int channels = s.channels - first < kChannels ? s.channels - first : kChannels;
      float gates[kChannels];
      find_gates(s, hidden + size_t(n) * s.hidden, excite, excite_bias, first, channels, gates);
      apply(s, gates, x + n * image, residual == nullptr ? nullptr : residual + n * image, applies,
            offset, first, channels, y + n * image);
    }
  }
}
