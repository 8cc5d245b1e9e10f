// Hopper's instructions, one a function.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace vocabshard::sm90::ptx {

#define VS_DEVICE __device__ __forceinline__

VS_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Read anew at every use: where accumulators fill the registers, nothing cheap is kept.
VS_DEVICE uint32_t thread() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// The same number in all lanes, and known to be so: addresses made of it stay out of the vector registers.
VS_DEVICE uint32_t uniform(uint32_t x) { return __shfl_sync(~0u, x, 0); }

// Sleeps about so long; memory is not read or written earlier or later for it.
VS_DEVICE void pause(uint32_t nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory"); }

// One instruction, where a selection and a sum are what else is made of it.
VS_DEVICE void add_if(bool wanted, uint32_t& to, uint32_t by) {
  asm("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p add.u32 %0, %0, %2;\n}"
      : "+r"(to)
      : "r"(static_cast<uint32_t>(wanted)), "r"(by));
}

// ---- barriers in shared memory ----

VS_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the cluster.
VS_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

VS_DEVICE void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

VS_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same barrier of the CTA `rank` of the cluster. Not .release.cluster: that form flushes caches at every stage.
VS_DEVICE void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

VS_DEVICE bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

VS_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- named barriers ----

VS_DEVICE void barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

VS_DEVICE void barrier_arrive(uint32_t id, uint32_t threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters ----

VS_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

VS_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
VS_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// ---- grids one behind the other ----

// The next grid may be set up; it waits in grid_wait for this one's end.
VS_DEVICE void grid_launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
VS_DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Between blocks of a device: who reads a word that was added to reads what was stored before.
VS_DEVICE void add_release(int32_t* at, int32_t by) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(by) : "memory");
}
VS_DEVICE void store_release(int32_t* at, int32_t x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
// Returns what was there. What threads wrote before a barrier before this, those see that add behind it.
VS_DEVICE uint32_t add_in_turn(uint32_t* at, uint32_t by) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(by) : "memory");
  return before;
}
VS_DEVICE int32_t load_acquire(const int32_t* at) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

// ---- tensor copies ----

VS_DEVICE void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

VS_DEVICE void copy_2d(uint32_t to, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// To the same place of every CTA in `mask`, and counted by the same barrier there.
VS_DEVICE void copy_2d_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t y,
                                 uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(mask)
      : "memory");
}

VS_DEVICE void copy_5d(uint32_t to, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t fourth, int32_t last) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(fourth), "r"(last)
      : "memory");
}

VS_DEVICE void copy_5d_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t fourth,
                                 int32_t last, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(fourth), "r"(last), "h"(mask)
      : "memory");
}

// The same, of lines that leave L2 before all others.
VS_DEVICE void copy_5d_once(uint32_t to, const CUtensorMap* map, uint32_t barrier, int32_t x, int32_t fourth,
                            int32_t last) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy;\n"
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %4, %5, %6}], [%2], policy;\n}" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(0), "r"(fourth), "r"(last)
      : "memory");
}

// What this thread wrote to shared memory is seen by copies and products issued behind the next barrier.
VS_DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warpgroups ----

template <int kRegisters>
VS_DEVICE void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
VS_DEVICE void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

VS_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
VS_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
VS_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Nobody else adds there at the time, so there is no order to choose. Subnormal sums become zero.
VS_DEVICE void add_in_memory(float* at, const float4& x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

// Loads that stay where they stand: the compiler may not make them early and keep what they bring.
VS_DEVICE float4 load_float4(const void* at) {
  float4 x;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at)
               : "memory");
  return x;
}
VS_DEVICE float load_float(const void* at) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(at) : "memory");
  return x;
}

// Stores without a branch, of lines that are not read soon: where a branch would have to end before the next shuffle.
VS_DEVICE void store_stream_if(bool wanted, void* to, uint4 x) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.cs.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                   static_cast<int>(wanted)),
               "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}
VS_DEVICE void store_stream_if(bool wanted, float* to, float x) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.cs.f32 [%1], %2;\n}" ::"r"(static_cast<int>(wanted)),
      "l"(to), "f"(x)
      : "memory");
}

// ---- arithmetic ----

// A maximum that keeps a NaN from either side, and +0 over -0.
VS_DEVICE float max_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

// 2^x by the special function unit, error 2^-22; results below the normal numbers are 0.
VS_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// By approximation, of normal ones.
VS_DEVICE float sqrt(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

VS_DEVICE bool is_infinite(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0x7f800000u; }

// A point that ptxas moves no arithmetic across; nothing else comes of it without a profiler that counts this event.
VS_DEVICE void schedule_fence() { asm volatile("pmevent 1;"); }

// x * 2^n cut to 32 bits, for any n: PTX shifts by 32 and more give 0, and a negative n is a huge unsigned one.
VS_DEVICE uint32_t shifted(uint32_t x, int32_t n) {
  uint32_t left, right;
  asm("shl.b32 %0, %1, %2;" : "=r"(left) : "r"(x), "r"(n));
  asm("shr.u32 %0, %1, %2;" : "=r"(right) : "r"(x), "r"(-n));
  return left | right;
}

}  // namespace vocabshard::sm90::ptx
