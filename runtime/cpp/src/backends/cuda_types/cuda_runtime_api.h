// What TensorRT's headers want of CUDA's: the names of two handles. No CUDA headers are needed to build: its functions
// are found at run time (cuda_api.h).
#pragma once

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
