// ort.h of the kernels says what ONNX Runtime's headers say.
#include <onnxruntime_c_api.h>

#include <cstddef>
#include <type_traits>

#include "ort.h"

#define CHECK_ENTRY(name) \
    static_assert(offsetof(OrtApi, name) == ort::name * sizeof(void*), "another place of " #name)
CHECK_ENTRY(CreateStatus);
CHECK_ENTRY(CreateCustomOpDomain);
CHECK_ENTRY(CustomOpDomain_Add);
CHECK_ENTRY(AddCustomOpDomain);
CHECK_ENTRY(GetTensorMutableData);
CHECK_ENTRY(GetDimensionsCount);
CHECK_ENTRY(GetDimensions);
CHECK_ENTRY(GetTensorTypeAndShape);
CHECK_ENTRY(KernelInfoGetAttribute_float);
CHECK_ENTRY(KernelInfoGetAttribute_int64);
CHECK_ENTRY(KernelContext_GetInput);
CHECK_ENTRY(KernelContext_GetOutput);
CHECK_ENTRY(ReleaseStatus);
CHECK_ENTRY(ReleaseTensorTypeAndShapeInfo);
CHECK_ENTRY(KernelContext_ParallelFor);

// Functions that take and return pointers, numbers and enumerations alike are called alike.
template <class Type>
struct Plain {
    using type = std::conditional_t<std::is_pointer_v<Type>, void*, Type>;
};
template <class Type>
requires std::is_enum_v<Type>
struct Plain<Type> {
    static_assert(sizeof(Type) == sizeof(int));
    using type = int;
};
template <class Result, class... Arguments>
struct Plain<Result (*)(Arguments...)> {
    using type = typename Plain<Result>::type (*)(typename Plain<Arguments>::type...);
};
template <class Result, class... Arguments>
struct Plain<Result (*)(Arguments...) noexcept> : Plain<Result (*)(Arguments...)> {};

#define CHECK_MEMBER(name)                                                                 \
    static_assert(offsetof(OrtCustomOp, name) == offsetof(ort::CustomOp, name) &&          \
                      std::is_same_v<typename Plain<decltype(OrtCustomOp::name)>::type,    \
                                     typename Plain<decltype(ort::CustomOp::name)>::type>, \
                  "another member " #name)
CHECK_MEMBER(version);
CHECK_MEMBER(CreateKernel);
CHECK_MEMBER(GetName);
CHECK_MEMBER(GetExecutionProviderType);
CHECK_MEMBER(GetInputType);
CHECK_MEMBER(GetInputTypeCount);
CHECK_MEMBER(GetOutputType);
CHECK_MEMBER(GetOutputTypeCount);
CHECK_MEMBER(KernelCompute);
CHECK_MEMBER(KernelDestroy);
CHECK_MEMBER(GetInputCharacteristic);
CHECK_MEMBER(GetOutputCharacteristic);
CHECK_MEMBER(GetInputMemoryType);
CHECK_MEMBER(GetVariadicInputMinArity);
CHECK_MEMBER(GetVariadicInputHomogeneity);
CHECK_MEMBER(GetVariadicOutputMinArity);
CHECK_MEMBER(GetVariadicOutputHomogeneity);
CHECK_MEMBER(CreateKernelV2);
CHECK_MEMBER(KernelComputeV2);
static_assert(sizeof(ort::CustomOp) >= sizeof(OrtCustomOp), "members are missing");
static_assert(offsetof(OrtApiBase, GetApi) == offsetof(ort::ApiBase, GetApi));

static_assert(ort::FLOAT == static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT));
static_assert(ort::UINT8 == static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8));
static_assert(ort::INT64 == static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64));
static_assert(ort::BOOL == static_cast<int>(ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL));
static_assert(ort::API_VERSION <= ORT_API_VERSION);
