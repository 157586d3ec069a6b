// Where threadgroup arrays live: each declaration of the kernel gets a section of its own, whose ends the linker names, and
// a gap that belongs to nobody, so that running past an array is noticed.
#pragma once
#include "interface.h"

constexpr int kStorageGap = 64;

#define LK_UNCHECKED __attribute__((no_sanitize("thread")))

#ifdef __APPLE__
#define LK_SECTION(k) "__DATA,lk_tg_" #k
#define LK_SECTION_ENDS(k)                                                          \
  extern char lk_begin_##k[] __asm("section$start$__DATA$lk_tg_" #k);               \
  extern char lk_end_##k[] __asm("section$end$__DATA$lk_tg_" #k);
#define LK_SECTION_BEGIN(k) lk_begin_##k
#define LK_SECTION_END(k) lk_end_##k
#else
#define LK_SECTION(k) "lk_tg_" #k
#define LK_SECTION_ENDS(k)                                                          \
  extern "C" char __start_lk_tg_##k[] __attribute__((visibility("hidden")));        \
  extern "C" char __stop_lk_tg_##k[] __attribute__((visibility("hidden")));
#define LK_SECTION_BEGIN(k) __start_lk_tg_##k
#define LK_SECTION_END(k) __stop_lk_tg_##k
#endif

#define LK_DECLARE_STORAGE(k) \
  LK_SECTION_ENDS(k)          \
  static __attribute__((section(LK_SECTION(k)), used, aligned(1))) char lk_gap_##k[kStorageGap];
// `used`: the compiler may neither drop an array nor forget a store to it.
#define LK_STORAGE(k) static __attribute__((section(LK_SECTION(k)), used))

// The section without its gap, which the compiler puts first or last.
inline lk::Storage lk_storage_entry(const char* name, char* begin, char* end, char* gap, int line) {
  return gap == begin ? lk::Storage{name, begin + kStorageGap, end, begin, end, line} : lk::Storage{name, begin, gap, begin, end, line};
}
#define LK_STORAGE_ENTRY(name, k, line) lk_storage_entry(name, LK_SECTION_BEGIN(k), LK_SECTION_END(k), lk_gap_##k, line)
