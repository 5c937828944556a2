# libpass_kernels.so, the operators of the CPU's trunk, beside the libraries and programs, which open it at run time.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(kernels ${CMAKE_CURRENT_SOURCE_DIR}/../kernels)
set(kernels_library ${CMAKE_BINARY_DIR}/libpass_kernels.so)
file(GLOB kernel_sources CONFIGURE_DEPENDS ${kernels}/*.cpp ${kernels}/*.h)
add_custom_command(OUTPUT ${kernels_library}
  COMMAND ${CMAKE_COMMAND} -E env CXX=${CMAKE_CXX_COMPILER}
    ${Python3_EXECUTABLE} ${kernels}/build.py --output ${kernels_library} --sanitize "${PASS_SANITIZE}"
  DEPENDS ${kernel_sources} ${kernels}/build.py VERBATIM)
add_custom_target(pass_kernels ALL DEPENDS ${kernels_library})
install(PROGRAMS ${kernels_library} DESTINATION ${CMAKE_INSTALL_LIBDIR})
