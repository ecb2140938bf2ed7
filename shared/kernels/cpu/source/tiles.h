// AMX's tiles: eight registers of up to 16 rows of 64 bytes. Numbers of tiles must be literals.
//
// TILE_DOT(c, a, b) adds to c [rows of a][16] fp32 the products of a's rows of 32 bf16 and b's 16 columns of 32, which
// lie in pairs: row i of b holds rows 2i and 2i + 1 of the matrix, element by element. TILE_DOT_BYTES adds to whole
// numbers those of 64 signed bytes and columns of 64 unsigned ones, which lie in fours; TILE_DOT_SIGNED and
// TILE_DOT_UNSIGNED those of signed and of unsigned bytes, and columns of signed ones.
//
// With TANDEM_EMULATED_TILES the same in plain C++, so that what is built of tiles is tested on every processor.
#pragma once

#include <cstdint>
#include <cstring>

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes = 64) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(bytes);
  }
};

#ifndef TANDEM_EMULATED_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Linux gives a process the tiles' 8 KiB of state only when asked for.
inline bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The intrinsics do not say what memory they read: stores before this come before them.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }
inline void set_tiles(const TileShapes& shapes) {
  __asm__ volatile("" ::"r"(&shapes) : "memory");
  _tile_loadconfig(&shapes);
}
inline void release_tiles() { _tile_release(); }
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_DOT_BYTES(c, a, b) _tile_dpbsud(c, a, b)
#define TILE_DOT_SIGNED(c, a, b) _tile_dpbssd(c, a, b)
#define TILE_DOT_UNSIGNED(c, a, b) _tile_dpbusd(c, a, b)

#else

struct EmulatedTiles {
  TileShapes shapes;
  alignas(64) unsigned char rows[8][16][64];

  void load(int tile, const void* from, int64_t stride) {
    std::memset(rows[tile], 0, sizeof rows[tile]);
    for (int r = 0; r < shapes.rows[tile]; r++)
      std::memcpy(rows[tile][r], (const char*)from + r * stride, shapes.row_bytes[tile]);
  }
  void store(int tile, void* to, int64_t stride) const {
    for (int r = 0; r < shapes.rows[tile]; r++) std::memcpy((char*)to + r * stride, rows[tile][r], shapes.row_bytes[tile]);
  }
  // Numbers below the smallest normal one count as 0. Even and odd products are summed apart.
  static float element(const uint16_t* row, int i) {
    const uint32_t bits = row[i] & 0x7f80 ? uint32_t(row[i]) << 16 : 0;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  void dot(int c, int a, int b) {
    for (int m = 0; m < shapes.rows[c]; m++) {
      float sums[2][16] = {}, *out = (float*)rows[c][m];
      for (int k = 0; k < shapes.row_bytes[a] / 4; k++)
        for (int half = 0; half < 2; half++) {
          const float x = element((const uint16_t*)rows[a][m], 2 * k + half);
          for (int n = 0; n < shapes.row_bytes[c] / 4; n++)
            sums[half][n] += x * element((const uint16_t*)rows[b][k], 2 * n + half);
        }
      for (int n = 0; n < shapes.row_bytes[c] / 4; n++) out[n] += sums[0][n] + sums[1][n];
    }
  }
  template <typename A, typename B>
  void dot_bytes(int c, int a, int b) {
    for (int m = 0; m < shapes.rows[c]; m++)
      for (int k = 0; k < shapes.row_bytes[a]; k++)
        for (int n = 0; n < shapes.row_bytes[c] / 4; n++)
          ((int32_t*)rows[c][m])[n] += A(rows[a][m][k]) * B(rows[b][k / 4][4 * n + k % 4]);
  }
};

inline thread_local EmulatedTiles emulated_tiles;

inline bool may_use_tiles() { return true; }
inline void finish_stores() {}
inline void set_tiles(const TileShapes& shapes) { emulated_tiles.shapes = shapes; }
inline void release_tiles() { emulated_tiles.shapes = {}; }
#define TILE_ZERO(tile) std::memset(emulated_tiles.rows[tile], 0, sizeof emulated_tiles.rows[tile])
#define TILE_LOAD(tile, from, stride) emulated_tiles.load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated_tiles.store(tile, to, stride)
#define TILE_DOT(c, a, b) emulated_tiles.dot(c, a, b)
#define TILE_DOT_BYTES(c, a, b) emulated_tiles.dot_bytes<int8_t, uint8_t>(c, a, b)
#define TILE_DOT_SIGNED(c, a, b) emulated_tiles.dot_bytes<int8_t, int8_t>(c, a, b)
#define TILE_DOT_UNSIGNED(c, a, b) emulated_tiles.dot_bytes<uint8_t, int8_t>(c, a, b)

#endif

// Tiles 0 to 3 are the products of two row tiles, 4 and 5, and two column tiles, 6 and 7.
class TwoByTwo {
 public:
  TwoByTwo() = default;
  TwoByTwo(const TwoByTwo&) = delete;
  ~TwoByTwo() {
    if (first_) release_tiles();
  }

  // Rows of tiles 4 and 5. Costs some 100 ns where they are others than before.
  void shape(int first, int second) {
    if (first == first_ && second == second_) return;
    TileShapes shapes;
    for (int tile : {0, 1, 4}) shapes.set(tile, first);
    for (int tile : {2, 3, 5}) shapes.set(tile, second);
    for (int tile : {6, 7}) shapes.set(tile, 16);
    set_tiles(shapes);
    first_ = first, second_ = second;
  }

 private:
  int first_ = 0, second_ = 0;
};
