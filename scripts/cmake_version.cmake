if(CMAKE_VERSION VERSION_LESS 3.25)
  message(FATAL_ERROR "too old")
endif()
