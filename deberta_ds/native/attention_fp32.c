/* Attention in fp32, forward. */
#define FP32
#include "attention.c"
