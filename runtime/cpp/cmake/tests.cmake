# ctest: Catch2 tests of the library's insides, and a user's program built against the installed package.
# programs/ are for the pytest tests of tests/cpp.
function(test_program name)
  add_executable(${name} ${ARGN})
  pass_flags(${name})
  target_include_directories(${name} PRIVATE src)
  target_include_directories(${name} SYSTEM PRIVATE ${onnxruntime_headers})
  target_compile_definitions(${name} PRIVATE ORT_API_MANUAL_INIT)
  target_link_libraries(${name} PRIVATE pass_static nlohmann_json::nlohmann_json Threads::Threads)
endfunction()

file(GLOB tests CONFIGURE_DEPENDS tests/*.cpp)
find_package(Catch2 REQUIRED)
test_program(pass-tests ${tests})
pass_unity(pass-tests)
target_include_directories(pass-tests PRIVATE ../kernels)
target_compile_options(pass-tests PRIVATE -O0) # halves the time to compile Catch2; libpass keeps its own level
target_link_libraries(pass-tests PRIVATE
  $<IF:$<TARGET_EXISTS:Catch2::Catch2WithMain>,Catch2::Catch2WithMain,Catch2::Catch2>)
add_test(NAME pass-tests COMMAND pass-tests)

file(GLOB programs CONFIGURE_DEPENDS tests/programs/*.cpp)
foreach(program ${programs})
  get_filename_component(name ${program} NAME_WE)
  test_program(${name} ${program})
endforeach()
foreach(program fake_gpu fake_ort replay)
  target_sources(${program} PRIVATE cli/json.cpp)
  target_include_directories(${program} PRIVATE cli tests)
endforeach()

set(consumer_flags "")
if(PASS_SANITIZE)
  set(consumer_flags -fsanitize=${PASS_SANITIZE})
endif()
add_test(NAME consumer COMMAND ${CMAKE_COMMAND}
  -DBUILD=${CMAKE_BINARY_DIR} -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/tests/consumer -DDIRECTORY=${CMAKE_BINARY_DIR}/consumer
  -DGENERATOR=${CMAKE_GENERATOR} -DFLAGS=${consumer_flags}
  -P ${CMAKE_CURRENT_SOURCE_DIR}/tests/consumer/run.cmake)
