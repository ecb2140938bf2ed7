#include "group.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstddef>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "ops.h"
#include "pause.h"
#include "simd.h"

namespace {

constexpr int64_t kHeaderBytes = 4096;
constexpr int kPauses = 32;                             // between two reads of the clock
constexpr int64_t kLeastSpinNs = 2'000, kMostSpinNs = 500'000;
constexpr int64_t kNapNs = 20'000'000;                  // between two checks that the other members still run
constexpr int64_t kBeatNs = 100'000'000;
static_assert(sizeof(Shared) <= kHeaderBytes);

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* limit) {
  syscall(SYS_futex, (uint32_t*)&word, what, value, limit, nullptr, 0);
}

bool reached(const std::atomic<uint32_t>& arrived, uint32_t message) { return int32_t(arrived.load() - message) >= 0; }

// Whether a member has left or has stopped running. Its last beat is compared with this process's own last one, not
// with the clock: where neither process gets a core, neither is stuck.
bool is_gone(const Group& g, int other) {
  const Member& member = g.shared->members[other];
  return member.left.load() || g.shared->members[g.rank].beat.load() - member.beat.load() >= g.stuck_ns;
}

// 0, or 1 + the name of a member that has failed; also of `waited_for`, if it is gone.
int fault(Group& g, int waited_for) {
  const uint32_t failed = g.shared->failed.load();
  if (failed) return int(failed);
  if (!is_gone(g, waited_for)) return 0;
  uint32_t none = 0;
  g.shared->failed.compare_exchange_strong(none, uint32_t(g.names[waited_for] + 1));
  return int(g.shared->failed.load());
}

bool spin_for(const Member& member, uint32_t message, int64_t begin, int64_t limit_ns) {
  do {
    for (int i = 0; i < kPauses; i++) {
      if (reached(member.arrived, message)) return true;
      pause_a_little();
    }
  } while (now_ns() - begin < limit_ns);
  return false;
}

int sleep_for(Group& g, int other, uint32_t message) {
  Member& member = g.shared->members[other];
  const timespec nap{0, kNapNs};
  while (true) {
    member.sleepers.fetch_add(1);
    const uint32_t seen = member.arrived.load();
    if (int32_t(seen - message) < 0) futex(member.arrived, FUTEX_WAIT, seen, &nap);
    member.sleepers.fetch_sub(1);
    if (reached(member.arrived, message)) return 0;
    const int failed = fault(g, other);
    if (reached(member.arrived, message)) return 0;  // its last message, then it left
    if (failed) return failed;
  }
}

// A member spins for as long as that has paid off lately, then sleeps. Between ranks with a core each, a message comes
// within microseconds; where ranks share a core, the other one cannot send before this one has left the core. Spinning
// does not call sched_yield: with anything else to run on the core, that costs a whole time slice.
int wait_for(Group& g, int other, uint32_t message) {
  const Member& member = g.shared->members[other];
  if (reached(member.arrived, message)) return 0;
  const int64_t begin = now_ns();
  const int failed = spin_for(member, message, begin, g.spin_ns) ? 0 : sleep_for(g, other, message);
  const bool was_short = now_ns() - begin < kMostSpinNs;
  g.spin_ns = was_short ? std::min(kMostSpinNs, g.spin_ns * 2) : std::max(kLeastSpinNs, g.spin_ns / 2);
  return failed;
}

int wait_for_all(Group& g, uint32_t message) {
  for (int other = 0; other < g.size; other++)
    if (other != g.rank)
      if (const int failed = wait_for(g, other, message)) return failed;
  return 0;
}

// Message number `count + 1`; the slot is free to write afterwards.
int begin(Group& g) {
  if (const uint32_t failed = g.shared->failed.load(std::memory_order_relaxed)) return int(failed);
  return wait_for_all(g, g.count++);
}

void arrive(Group& g) {
  Member& own = g.shared->members[g.rank];
  own.arrived.store(g.count);
  if (own.sleepers.load() > 0) futex(own.arrived, FUTEX_WAKE, INT_MAX, nullptr);
}

// y = the parts' sum, in fp32, in their order. `parts` are of any alignment; y may be one of them.
template <typename T>
void add_parts(const T* const* parts, int num_parts, T* y, int64_t count) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    Floats sum = load16(parts[0] + i);
    for (int p = 1; p < num_parts; p++) sum = sum + load16(parts[p] + i);
    store16(y + i, sum);
  }
  if (i == count) return;
  T rest[16] = {};
  Floats sum = zeros();
  for (int p = 0; p < num_parts; p++) {
    std::memcpy(rest, parts[p] + i, (count - i) * sizeof(T));
    sum = p ? sum + load16(rest) : load16(rest);
  }
  store16(rest, sum);
  std::memcpy(y + i, rest, (count - i) * sizeof(T));
}

// The members' parts at `offset`: the own one is where it was, the others' are in their slots.
template <typename T>
void add_at(const Group& g, T* x, int64_t offset, int64_t count) {
  const T* parts[kMostMembers];
  for (int member = 0; member < g.size; member++)
    parts[member] = (member == g.rank ? x : (const T*)g.slot(member, g.count)) + offset;
  add_parts(parts, g.size, x + offset, count);
}

template <typename T>
int reduce_at_once(Group& g, T* x, int64_t count) {
  if (const int failed = begin(g)) return failed;
  std::memcpy(g.slot(g.rank, g.count), x, count * sizeof(T));
  arrive(g);
  if (const int failed = wait_for_all(g, g.count)) return failed;
  add_at(g, x, 0, count);
  return 0;
}

// Each member adds its share, then takes the others' sums: of n members, each reads 2 instead of n - 1 times x.
template <typename T>
int reduce_in_shares(Group& g, T* x, int64_t count) {
  const auto first = [&](int member) { return (count * member / g.size) & ~int64_t(15); };
  const auto last = [&](int member) { return member + 1 == g.size ? count : first(member + 1); };
  if (const int failed = begin(g)) return failed;
  std::memcpy(g.slot(g.rank, g.count), x, count * sizeof(T));
  arrive(g);
  if (const int failed = wait_for_all(g, g.count)) return failed;
  const int64_t own = first(g.rank), length = last(g.rank) - own;
  add_at(g, x, own, length);
  if (const int failed = begin(g)) return failed;
  std::memcpy(g.slot(g.rank, g.count), x + own, length * sizeof(T));
  arrive(g);
  for (int member = 0; member < g.size; member++) {
    if (member == g.rank) continue;
    if (const int failed = wait_for(g, member, g.count)) return failed;
    std::memcpy(x + first(member), g.slot(member, g.count), (last(member) - first(member)) * sizeof(T));
  }
  return 0;
}

template <typename T>
int reduce(Group& g, T* x, int64_t count) {
  const int64_t most = g.slot_bytes / int64_t(sizeof(T));
  const bool at_once = g.size == 2 || count * int64_t(sizeof(T)) <= g.single_bytes;
  for (int64_t done = 0; done < count; done += most) {
    const int64_t length = std::min(most, count - done);
    if (const int failed = at_once ? reduce_at_once(g, x + done, length) : reduce_in_shares(g, x + done, length))
      return failed;
  }
  return 0;
}

// Marks the members of this process as running, from one thread, for as long as the process runs.
struct Heartbeat {
  std::mutex mutex;
  std::vector<Member*> members;
  bool runs = false;

  void add(Member* member) {
    const std::lock_guard lock(mutex);
    member->beat.store(now_ns());
    members.push_back(member);
    if (!runs) std::thread([this] { beat(); }).detach();
    runs = true;
  }
  void remove(Member* member) {
    const std::lock_guard lock(mutex);
    std::erase(members, member);
  }
  void beat() {
    const timespec pause{0, kBeatNs};
    while (true) {
      {
        const std::lock_guard lock(mutex);
        for (Member* member : members) member->beat.store(now_ns());
      }
      nanosleep(&pause, nullptr);
    }
  }
};

Heartbeat& heartbeat() {
  static Heartbeat* heartbeat = new Heartbeat;  // never destroyed: its thread ends with the process
  return *heartbeat;
}

}  // namespace

int all_reduce(Group& group, void* x, int64_t count, bool is_bf16) {
  return is_bf16 ? reduce(group, (bf16*)x, count) : reduce(group, (float*)x, count);
}

// Bytes of the memory that `size` members share.
extern "C" int64_t tandem_group_bytes(int64_t size, int64_t slot_bytes) { return kHeaderBytes + 2 * size * slot_bytes; }

// Joins the group in the memory behind a file descriptor, which holds zeros before its first member joins; null where
// it cannot be mapped. It stays mapped, and the heartbeat runs, until the member leaves or its process ends. Up to
// `single_bytes`, sums take one message. A member that is not seen running for `stuck_ns` has failed. names [size]: of
// the members, for errors.
extern "C" Group* tandem_group_join(
    int descriptor, int64_t rank, int64_t size, const int64_t* names, int64_t slot_bytes, int64_t single_bytes,
    int64_t stuck_ns) {
  void* memory =
      mmap(nullptr, tandem_group_bytes(size, slot_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) return nullptr;
  Shared* shared = (Shared*)memory;
  heartbeat().add(&shared->members[rank]);
  Group* group = new Group{
      shared, (char*)memory + kHeaderBytes, slot_bytes, single_bytes, stuck_ns, kMostSpinNs, 0, int(rank), int(size), {}};
  std::copy_n(names, size, group->names);
  return group;
}

// 0: the members have all joined; 1 + the name of one that has failed; -1 - that of one that has not joined yet.
extern "C" int tandem_group_meet(Group* group, int64_t limit_ns) {
  const int64_t end = now_ns() + limit_ns;
  const timespec nap{0, 1'000'000};
  for (int other = 0; other < group->size; other++)
    while (group->shared->members[other].beat.load() == 0) {
      if (const uint32_t failed = group->shared->failed.load()) return int(failed);
      if (now_ns() > end) return -1 - group->names[other];
      nanosleep(&nap, nullptr);
    }
  return 0;
}

// What this member has sent stays readable; waits for more of it end.
extern "C" void tandem_group_leave(Group* group) {
  Member& own = group->shared->members[group->rank];
  heartbeat().remove(&own);
  own.left.store(1);
  futex(own.arrived, FUTEX_WAKE, INT_MAX, nullptr);
  munmap(group->shared, tandem_group_bytes(group->size, group->slot_bytes));
  delete group;
}

// Marks a member, by its name, as failed: every wait of the others ends.
extern "C" void tandem_group_fail(Group* group, int64_t name) {
  uint32_t none = 0;
  group->shared->failed.compare_exchange_strong(none, uint32_t(name + 1));
  for (int i = 0; i < group->size; i++) futex(group->shared->members[i].arrived, FUTEX_WAKE, INT_MAX, nullptr);
}

// 0, or 1 + the name of a member that has failed, has left or is not seen running. Changes nothing for the others.
extern "C" int tandem_group_fault(Group* group) {
  if (const uint32_t failed = group->shared->failed.load()) return int(failed);
  for (int other = 0; other < group->size; other++)
    if (other != group->rank && is_gone(*group, other)) return group->names[other] + 1;
  return 0;
}

extern "C" int tandem_all_reduce(Group* group, void* x, int64_t count, int is_bf16) {
  return all_reduce(*group, x, count, is_bf16);
}

// x [bytes] of every member, to member 0's `out` [size, bytes]; null at the others.
extern "C" int tandem_gather(Group* group, const void* x, int64_t bytes, void* out) {
  Group& g = *group;
  for (int64_t done = 0; done < bytes || done == 0; done += g.slot_bytes) {
    const int64_t length = std::min(g.slot_bytes, bytes - done);
    if (const int failed = begin(g)) return failed;
    if (g.rank) std::memcpy(g.slot(g.rank, g.count), (const char*)x + done, length);
    arrive(g);
    if (g.rank) continue;
    std::memcpy((char*)out + done, (const char*)x + done, length);
    for (int member = 1; member < g.size; member++) {
      if (const int failed = wait_for(g, member, g.count)) return failed;
      std::memcpy((char*)out + member * bytes + done, g.slot(member, g.count), length);
    }
  }
  return 0;
}

// x [bytes] of member 0, to all.
extern "C" int tandem_broadcast(Group* group, void* x, int64_t bytes) {
  Group& g = *group;
  for (int64_t done = 0; done < bytes; done += g.slot_bytes) {
    const int64_t length = std::min(g.slot_bytes, bytes - done);
    if (const int failed = begin(g)) return failed;
    if (g.rank == 0) std::memcpy(g.slot(0, g.count), (const char*)x + done, length);
    arrive(g);
    if (g.rank == 0) continue;
    if (const int failed = wait_for(g, 0, g.count)) return failed;
    std::memcpy((char*)x + done, g.slot(0, g.count), length);
  }
  return 0;
}

// x [size, bytes] of member 0, to each member's `out` [bytes] its own part.
extern "C" int tandem_scatter(Group* group, const void* x, int64_t bytes, void* out) {
  Group& g = *group;
  const int64_t most = g.slot_bytes / std::max(1, g.size - 1);  // of one part, beside the others' in a slot
  for (int64_t done = 0; done < bytes; done += most) {
    const int64_t length = std::min(most, bytes - done);
    if (const int failed = begin(g)) return failed;
    if (g.rank == 0)
      for (int member = 1; member < g.size; member++)
        std::memcpy(g.slot(0, g.count) + (member - 1) * most, (const char*)x + member * bytes + done, length);
    arrive(g);
    if (g.rank == 0) {
      std::memcpy((char*)out + done, (const char*)x + done, length);
      continue;
    }
    if (const int failed = wait_for(g, 0, g.count)) return failed;
    std::memcpy((char*)out + done, g.slot(0, g.count) + (g.rank - 1) * most, length);
  }
  return 0;
}
