// What the operators compute, in one variant for each instruction set. All give the same bits: sums
// of integers are exact, and float operations are fused and ordered alike.
#pragma once
#include <cstddef>
#include <cstdint>

namespace pass {

constexpr int BLOCK = 32;   // inputs of a product that share a scale and an offset
constexpr int GROUP = 16;   // columns of a product that are packed together
constexpr int SEGMENT = 128;  // cache entries that attention sums at a time

// A block of a row in 8 bits: x is about scale * q. `sum` is scale times the sum of q, for weights
// with offsets; `shift` is the sum of q times -middle(), for symmetric ones.
struct RowBlock {
    int8_t q[BLOCK];
    float scale, sum;
    int32_t shift;
};

// Weights [inputs,columns] as code * scale + offset. A group of columns is a stream of its blocks:
// codes of `bits` bits, then the scales and the offsets of the 16 columns in float16. If
// `symmetric`, there are no offsets: the code in the middle, 2^(bits-1), is 0.
//   4 bits: 4 vectors of 64 bytes; byte 4c+j of vector v has the codes of column c and the inputs
//           8v+j (lower half) and 8v+4+j (upper half)
//   5 bits: the lower 4 bits as above, then 8 words of 64 bits: bit 4c+j of word u is the highest
//           bit of input 4u+j
//   8 bits: 8 vectors of 64 bytes; byte 4c+j of vector u is the code of input 4u+j
struct Packed {
    const uint8_t* data;
    int inputs, columns, bits;
    bool symmetric;

    int blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
    int groups() const { return (columns + GROUP - 1) / GROUP; }
    static constexpr int code_bytes(int bits) { return bits == 4 ? 256 : bits == 5 ? 320 : 512; }
    int block_bytes() const { return code_bytes(bits) + (symmetric ? 32 : 64); }
    int middle() const { return 1 << (bits - 1); }
    size_t group_bytes() const { return size_t(blocks()) * block_bytes(); }
    const uint8_t* group(int index) const { return data + index * group_bytes(); }
};

// Weights in float32: [inputs,columns], or [columns,inputs] if `by_column`.
struct Dense {
    const float* data;
    int inputs, columns;
    bool by_column;
};

// Attention of a window over one slot's cache of keys and values [kv_heads,capacity,size].
struct Attention {
    const float *keys, *values;
    const float* queries;  // [rows,heads,size], rotated and scaled
    const int64_t* row_position;
    const bool* window_mask;  // [rows,rows]
    int64_t length, window;   // valid entries before the window; sliding window, 0 for none
    int rows, heads, kv_heads, size;
    int64_t capacity;
};

constexpr float UNSEEN = -3e38f;  // the score of an entry that a row does not see
constexpr int QUERIES = 24;  // most queries of a part of attention

// Of queries over one segment: largest score, sum of exponentials, weighted sum.
struct Partial {
    float max[QUERIES], sum[QUERIES];
    float* weighted;  // [count,size]
};

enum Activation { NONE = 0, SILU = 1, GELU_TANH = 2 };

struct Kernels {
    const char* name;
    int tile_rows;  // most rows of product_tile
    // Rounds the inputs x [inputs]; block b goes to out[b * step]. middle: of the weights, if they
    // are symmetric, else 0.
    void (*round_row)(const float* x, int inputs, int middle, RowBlock* out, int step);
    // y [rows,16] = rows a [blocks,rows] times a group of columns.
    void (*product_tile)(const Packed& w, int group, int rows, const RowBlock* a, float* y);
    // y [rows, columns first..last) (stride: w.columns) = x [rows,inputs] times w.
    void (*dense)(const Dense& w, int rows, const float* x, int first, int last, float* y);
    // y = x + r, or x if r is null; normed = y / rms(y) * scale.
    void (*add_norm)(const float* x, const float* r, const float* scale, int size, float epsilon,
                     float* y, float* normed);
    // Rotates the first 2 * half elements of a head, and multiplies all by `scale`.
    void (*rotate)(const float* x, const float* cos, const float* sin, int half, int size,
                   float scale, float* y);
    // y [16 columns of each row] = activation(gate) * up.
    void (*gate)(int activation, const float* gate, const float* up, int count, float* y);
    // Over one segment, for queries first .. first+count-1 of a K/V head; query i belongs to row
    // i / group and head i % group of the head's group.
    void (*attend)(const Attention& a, int kv_head, int first, int count, int64_t segment,
                   Partial& out);
    // y [queries,size] = the joined results over all segments.
    void (*join)(const Partial* parts, int segments, int count, int size, float* const* y);
    // Writes row `column` of the transposed weights: [inputs].
    void (*unpack_column)(const Packed& w, int64_t column, float* y);
};

// The variant for this CPU, or for the environment variable PASS_KERNELS_CPU.
const Kernels& kernels();

}  // namespace pass
