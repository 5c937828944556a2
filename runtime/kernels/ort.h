// The part of ONNX Runtime's stable C interface that the operators use, because its headers are not
// in its Python package. tests/abi.cpp of the C++ runtime compares this with the real headers.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ort {

struct Status;
struct Context;
struct Info;
struct Value;
struct ShapeInfo;
struct Domain;
struct SessionOptions;

constexpr uint32_t API_VERSION = 18;

enum Type { FLOAT = 1, UINT8 = 2, INT64 = 7, BOOL = 9 };

// Places in the table of functions that is OrtApi.
enum Entry {
    CreateStatus = 0,
    CreateCustomOpDomain = 26,
    CustomOpDomain_Add = 27,
    AddCustomOpDomain = 28,
    GetTensorMutableData = 51,
    GetDimensionsCount = 61,
    GetDimensions = 62,
    GetTensorTypeAndShape = 65,
    KernelInfoGetAttribute_float = 85,
    KernelInfoGetAttribute_int64 = 86,
    KernelContext_GetInput = 90,
    KernelContext_GetOutput = 91,
    ReleaseStatus = 93,
    ReleaseTensorTypeAndShapeInfo = 99,
    KernelContext_ParallelFor = 274,
};

using Api = const void* const*;

struct ApiBase {
    Api (*GetApi)(uint32_t version);
    const char* (*GetVersionString)();
};

// OrtCustomOp of version 16: later versions only add members.
struct CustomOp {
    uint32_t version;
    void* (*CreateKernel)(const CustomOp*, Api, const Info*);
    const char* (*GetName)(const CustomOp*);
    const char* (*GetExecutionProviderType)(const CustomOp*);
    int (*GetInputType)(const CustomOp*, size_t);
    size_t (*GetInputTypeCount)(const CustomOp*);
    int (*GetOutputType)(const CustomOp*, size_t);
    size_t (*GetOutputTypeCount)(const CustomOp*);
    void (*KernelCompute)(void*, Context*);
    void (*KernelDestroy)(void*);
    int (*GetInputCharacteristic)(const CustomOp*, size_t);
    int (*GetOutputCharacteristic)(const CustomOp*, size_t);
    int (*GetInputMemoryType)(const CustomOp*, size_t);
    int (*GetVariadicInputMinArity)(const CustomOp*);
    int (*GetVariadicInputHomogeneity)(const CustomOp*);
    int (*GetVariadicOutputMinArity)(const CustomOp*);
    int (*GetVariadicOutputHomogeneity)(const CustomOp*);
    Status* (*CreateKernelV2)(const CustomOp*, Api, const Info*, void**);
    Status* (*KernelComputeV2)(void*, Context*);
    void* later[8];
};

}  // namespace ort
