# The instruction sets that kernels are compiled for, and their flags. The names are the ones of tidegate::Isa.
# Features are listed one by one: g++ 12 does not know -march=znver4. -O3 always: at -O2 g++ 12 leaves tile loops
# rolled. Contraction is off so that only an fma written in a kernel is an fma.
set(TIDEGATE_ISAS scalar avx2 avx512 avx512_bf16)
set(TIDEGATE_OPTIMISE -O3 CACHE STRING "of kernels; less only to look at something else than their speed")
if(TIDEGATE_SANITIZE)
  set(TIDEGATE_OPTIMISE -O1)  # with a sanitizer, g++ 12 works on an -O3 kernel for minutes; the accesses are the same
endif()
set(TIDEGATE_FLAGS_common ${TIDEGATE_OPTIMISE} -ffp-contract=off -fno-math-errno -fno-exceptions -fno-rtti)
set(TIDEGATE_FLAGS_scalar)
set(TIDEGATE_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(TIDEGATE_FLAGS_avx512 ${TIDEGATE_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
# Every CPU with the bf16 dot product has the one of int8 too (VNNI), so it has no level of its own.
set(TIDEGATE_FLAGS_avx512_bf16 ${TIDEGATE_FLAGS_avx512} -mavx512bf16 -mavx512vnni)

if(TIDEGATE_EMULATE_AVX512)
  # Test builds only: the AVX-512 vocabulary runs on AVX2 through a portable translation of its intrinsics.
  set(TIDEGATE_FLAGS_avx512 ${TIDEGATE_FLAGS_avx2} -DTIDEGATE_EMULATE_AVX512)
  set(TIDEGATE_FLAGS_avx512_bf16 ${TIDEGATE_FLAGS_avx512})
endif()

if(TIDEGATE_SANITIZE AND NOT TIDEGATE_EMULATE_AVX512 AND EXISTS /proc/cpuinfo)
  # What this CPU cannot run needs no instrumentation, which is most of the compiler's work.
  file(STRINGS /proc/cpuinfo features REGEX "^flags" LIMIT_COUNT 1)
  if(NOT features MATCHES " avx512f ")
    list(APPEND TIDEGATE_FLAGS_avx512 -fno-sanitize=all -g0)
    list(APPEND TIDEGATE_FLAGS_avx512_bf16 -fno-sanitize=all -g0)
  endif()
endif()

# tidegate_add_kernel(<name> <file>): compiles a file once per instruction set.
function(tidegate_add_kernel name file)
  foreach(isa ${TIDEGATE_ISAS})
    set(target kernel_${name}_${isa})
    add_library(${target} OBJECT ${file})
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
    target_compile_definitions(${target} PRIVATE TIDEGATE_ISA=${isa})
    target_compile_options(${target} PRIVATE ${TIDEGATE_WARNINGS} ${TIDEGATE_FLAGS_common} ${TIDEGATE_FLAGS_${isa}})
    set_property(GLOBAL APPEND PROPERTY TIDEGATE_KERNELS ${target})
  endforeach()
endfunction()

# tidegate_add_operator(<name> [more sources]): src/ops/<name>/ holds <name>.cpp (checks, partition, dispatch), reference.cpp,
# kernel.cpp (compiled once per instruction set), test.cpp (and more *_test.cpp) and bench.cpp. An operator that only puts
# the kernels of others together has neither reference.cpp nor kernel.cpp.
function(tidegate_add_operator name)
  set(dir ${PROJECT_SOURCE_DIR}/src/ops/${name})
  target_sources(tidegate_objects PRIVATE ${dir}/${name}.cpp ${ARGN})
  if(EXISTS ${dir}/kernel.cpp)
    target_sources(tidegate_objects PRIVATE ${dir}/reference.cpp)
    tidegate_add_kernel(${name} ${dir}/kernel.cpp)
  endif()
  file(GLOB tests CONFIGURE_DEPENDS ${dir}/*test.cpp)
  set_property(GLOBAL APPEND PROPERTY TIDEGATE_TESTS ${tests})
  if(EXISTS ${dir}/bench.cpp)
    set_property(GLOBAL APPEND PROPERTY TIDEGATE_BENCHES ${dir}/bench.cpp)
  endif()
endfunction()
