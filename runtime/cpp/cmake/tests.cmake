# ctest: Catch2 tests of the library's insides, and a program of a user's against the installed package.
file(GLOB tests CONFIGURE_DEPENDS tests/*.cpp)
if(tests)
  find_package(Catch2 REQUIRED)
  add_executable(pass-tests ${tests})
  pass_flags(pass-tests)
  target_include_directories(pass-tests PRIVATE src)
  target_include_directories(pass-tests SYSTEM PRIVATE ${onnxruntime_headers})
  target_compile_definitions(pass-tests PRIVATE ORT_API_MANUAL_INIT)
  target_link_libraries(pass-tests PRIVATE pass_static nlohmann_json::nlohmann_json Threads::Threads
    $<IF:$<TARGET_EXISTS:Catch2::Catch2WithMain>,Catch2::Catch2WithMain,Catch2::Catch2>)
  add_test(NAME pass-tests COMMAND pass-tests)
endif()
