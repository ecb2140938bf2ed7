// Sums and messages between a few processes of one host, through memory that all of them map.
//
// A member has two slots. The n-th message of a group is written to slot n % 2 of each member that sends, and `arrived`
// = n shows that it is there. A member that arrived at n has read all of message n - 1, so a slot may be written again
// when all members have arrived at the message before. All members make the same calls in the same order.
#pragma once

#include <atomic>
#include <cstdint>

constexpr int kMostMembers = 16;

struct alignas(128) Member {  // two cache lines: processors fetch them in pairs
  std::atomic<uint32_t> arrived;   // messages, of which the last one is in its slot
  std::atomic<uint32_t> sleepers;  // waits that sleep until `arrived` changes
  std::atomic<uint32_t> left;      // whether it sends nothing any more
  std::atomic<int64_t> beat;       // nanoseconds of the monotonic clock: when it was last seen running
};

struct Shared {
  std::atomic<uint32_t> failed;  // 0, or 1 + the name of a member that is gone, of this group or not
  Member members[kMostMembers];
};

struct Group {
  Shared* shared;
  char* slots;
  int64_t slot_bytes, single_bytes, stuck_ns;
  int64_t spin_ns;  // before a wait sleeps
  uint32_t count;  // messages so far
  int rank, size;
  int names[kMostMembers];  // of the members, for errors: their numbers in a larger group

  char* slot(int member, uint32_t message) const { return slots + (member * 2 + int(message % 2)) * slot_bytes; }
};

// Adds x [count] of all members, in the members' order, into each one's x: the same bits everywhere. Returns 0, or
// 1 + the name of a member that is gone.
int all_reduce(Group& group, void* x, int64_t count, bool is_bf16);
