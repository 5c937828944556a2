# backends/trt/nvinfer.cpp, once for each directory of headers in `includes`: an object with names of its own, which end in
# the headers' major version. A library of another major version cannot be called through them.
set(tensorrt_objects "")
function(pass_tensorrt includes)
  foreach(include IN LISTS includes)
    unset(headers)
    find_path(headers NvInferRuntime.h HINTS ${include} REQUIRED NO_DEFAULT_PATH NO_CACHE)
    # NV_TENSORRT_MAJOR itself, or the macro that it stands for.
    file(STRINGS ${headers}/NvInferVersion.h line LIMIT_COUNT 1
      REGEX "^ *#define (NV_TENSORRT_MAJOR|TRT_MAJOR_[A-Z]+) +[0-9]+")
    string(REGEX REPLACE "^[^0-9]*([0-9]+).*" "\\1" major "${line}")
    add_library(pass_tensorrt_${major} OBJECT src/backends/trt/nvinfer.cpp)
    pass_flags(pass_tensorrt_${major})
    set_target_properties(pass_tensorrt_${major} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_include_directories(pass_tensorrt_${major} PRIVATE include src)
    target_include_directories(pass_tensorrt_${major} SYSTEM PRIVATE ${headers} src/backends/cuda_types)
    target_compile_definitions(pass_tensorrt_${major}
      PRIVATE PASS_BUILDING PASS_TRT_MAKE=make_tensorrt_${major} nvinfer1=nvinfer1_${major})
    target_compile_definitions(pass_objects PRIVATE PASS_TENSORRT_${major})
    list(APPEND tensorrt_objects $<TARGET_OBJECTS:pass_tensorrt_${major}>)
  endforeach()
  set(tensorrt_objects ${tensorrt_objects} PARENT_SCOPE)
endfunction()
