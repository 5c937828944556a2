# Install into a directory of its own, build the consumer against that, run it, and look at what the library shows.
# BUILD, SOURCE, DIRECTORY, GENERATOR, FLAGS: given by cmake/tests.cmake.
file(REMOVE_RECURSE ${DIRECTORY})
macro(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE output)
endmacro()
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${DIRECTORY}/installed)
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${DIRECTORY}/build -G ${GENERATOR} -DCMAKE_CXX_FLAGS=${FLAGS}
  -DCMAKE_PREFIX_PATH=${DIRECTORY}/installed)
run(${CMAKE_COMMAND} --build ${DIRECTORY}/build)
foreach(library pass static)
  run(${DIRECTORY}/build/consumer_${library} ${DIRECTORY})
  if(NOT output STREQUAL "error: ${DIRECTORY} is not a bundle: it has no pass_config.json (make one with pass-export)\n")
    message(FATAL_ERROR "consumer_${library} says: ${output}")
  endif()
endforeach()

# Nothing but our own names, and of those only what PASS_API marks.
file(GLOB_RECURSE library ${DIRECTORY}/installed/*/libpass.so)
run(nm -D --defined-only --demangle ${library})
foreach(hidden nlohmann "pass::strict" "pass::Manifest" "pass::Plan" "pass::sha256")
  if(output MATCHES " T ${hidden}" OR output MATCHES " W ${hidden}")
    message(FATAL_ERROR "libpass.so shows ${hidden}")
  endif()
endforeach()
if(NOT output MATCHES " T pass::Bundle::Bundle")
  message(FATAL_ERROR "libpass.so does not show pass::Bundle")
endif()
