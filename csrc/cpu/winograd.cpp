// The transforms of cpu/winograd.hpp under names for C: one library for images of all sizes.

#include "cpu/winograd.hpp"

using plantune::Images;
using Winograd = plantune::TiledConv<plantune::Winograd>;
using Karatsuba = plantune::TiledConv<plantune::Karatsuba>;

extern "C" {

void winograd_input(const Images* images, const float* x, float* v) {
  Winograd::transform_input(*images, x, v);
}

void winograd_output(const Images* images, const float* m, const float* bias,
                     const float* residual, float least, float* y) {
  Winograd::transform_output(*images, m, bias, residual, least, y);
}

void karatsuba_input(const Images* images, const float* x, float* v) {
  Karatsuba::transform_input(*images, x, v);
}

void karatsuba_output(const Images* images, const float* m, const float* bias,
                      const float* residual, float least, float* y) {
  Karatsuba::transform_output(*images, m, bias, residual, least, y);
}

}  // extern "C"
