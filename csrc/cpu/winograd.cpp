// The transforms of cpu/winograd.hpp under names for C: one library for images of all sizes.

#include "cpu/winograd.hpp"

using plantune::Epilogue;
using plantune::Images;
using Winograd = plantune::TiledConv<plantune::Winograd>;
using Karatsuba = plantune::TiledConv<plantune::Karatsuba>;

extern "C" {

void winograd_input(const Images* images, const float* x, float* v) {
  Winograd::transform_input(*images, x, v);
}

void winograd_output(const Images* images, const float* m, const Epilogue* epilogue, float* y) {
  Winograd::transform_output(*images, m, *epilogue, y);
}

void karatsuba_input(const Images* images, const float* x, float* v) {
  Karatsuba::transform_input(*images, x, v);
}

void karatsuba_output(const Images* images, const float* m, const Epilogue* epilogue, float* y) {
  Karatsuba::transform_output(*images, m, *epilogue, y);
}

}  // extern "C"
