// The types that TensorRT's headers need from CUDA's, so that building needs no CUDA headers.
// CUDA's functions are found at run time (cuda_api.cpp).
#pragma once

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
