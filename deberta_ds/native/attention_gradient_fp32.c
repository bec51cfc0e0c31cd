/* Attention in fp32, backward. */
#define FP32
#include "attention_gradient.c"
