// Compresses plain panels of bf16 weights (panels.h).
#include <algorithm>
#include <numeric>

#include "ops.h"
#include "panels.h"
#include "thread_pool.h"

namespace {

struct Source {
  const uint16_t* words;  // a plain panel: [k / 2][2][16] pairs
  int64_t k_size;

  int64_t count() const { return k_size * kColumns; }
  // k * 32 + output of the word at `index`.
  static int64_t place(int64_t index) { return (index / 64 * 2 + index % 2) * kColumns + index % 64 / 2; }
};

// The 15 upper bytes that most words have, behind 0; returns how many words have another one.
int64_t choose_upper(const Source& panel, uint8_t* upper) {
  int64_t counts[256] = {};
  for (int64_t i = 0; i < panel.count(); i++) counts[panel.words[i] >> 8]++;
  int order[255];
  std::iota(order, order + 255, 1);
  std::partial_sort(order, order + 15, order + 255, [&](int a, int b) { return counts[a] > counts[b]; });
  upper[0] = 0;
  int64_t rare = panel.count() - counts[0];
  for (int i = 0; i < 15; i++) {
    upper[i + 1] = uint8_t(order[i]);
    rare -= counts[order[i]];
  }
  return rare;
}

// Splits 64 words into lower bytes and their upper bytes' indices in the table; both are 0 for a byte not in the table.
void split_half(const uint16_t* words, const uint8_t* upper, Words& lower, Words& places) {
  const Words low_byte = all_words(0x00ff00ff);
  const Words first = load_words(words), second = load_words(words + 32);
  const Words uppers = lower_bytes(shift_halves_right<8>(first), shift_halves_right<8>(second));
  Words found = where_equal(uppers, no_words(), all_bytes(0xff));
  places = no_words();
  for (int i = 1; i < 16; i++) {
    const Words same = where_equal(uppers, all_bytes(upper[i]), all_bytes(0xff));
    places = either(places, both(same, all_bytes(uint8_t(i))));
    found = either(found, same);
  }
  lower = both(found, lower_bytes(both(first, low_byte), both(second, low_byte)));
}

void compress_panel(const Source& panel, const uint8_t* upper, std::byte* out) {
  auto* head = (CompressedPanel::Head*)out;
  *head = {};
  std::memcpy(head->upper, upper, 16);
  std::byte* group = out + sizeof(*head);
  for (int64_t k = 0; k < panel.k_size; k += kGroupK, group += CompressedPanel::kGroupBytes) {
    Words lower[2], places[2];
    for (int i = 0; i < 2; i++) split_half(panel.words + k * kColumns + 64 * i, upper, lower[i], places[i]);
    store_words(group, lower[0]);
    store_words(group + 64, lower[1]);
    store_words(group + 128, either(places[0], shift_halves_left<4>(places[1])));
  }
  bool known[256] = {};
  for (int i = 0; i < 16; i++) known[upper[i]] = true;
  auto* rare = (CompressedPanel::Rare*)group;
  for (int64_t i = 0; i < panel.count(); i++)
    if (!known[panel.words[i] >> 8]) rare[head->num_rare++] = {uint32_t(Source::place(i)), to_float(bf16{panel.words[i]})};
  std::sort(rare, rare + head->num_rare, [](const auto& a, const auto& b) { return a.place < b.place; });
}

}  // namespace

// For each plain panel of w [n, k]: its table, [n / 32][16], and how many weights are not in it, [n / 32].
extern "C" void tandem_plan_compression(const void* w, int64_t k, int64_t n, uint8_t* upper, int64_t* num_rare) {
  parallel_for(n / kColumns, [&](int64_t p) {
    num_rare[p] = choose_upper({(const uint16_t*)w + p * kColumns * k, k}, upper + 16 * p);
  });
}

// Compressed panels, one every `stride` bytes: a multiple of 64, with room for the rare weights of the fullest one.
extern "C" void tandem_compress(const void* w, int64_t k, int64_t n, const uint8_t* upper, int64_t stride, void* out) {
  parallel_for(n / kColumns, [&](int64_t p) {
    compress_panel({(const uint16_t*)w + p * kColumns * k, k}, upper + 16 * p, (std::byte*)out + p * stride);
  });
}
