/* Passes over memory that torch takes in several steps. Each gives the very numbers of the torch operators that
   `passes.py` names beside it, and is compared with them before it is used. Plain C, one thread, no allocation. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 32 /* halved five times in `horizon_range` */
#define TURNS 16
#define BLOCK 64
#define BINS 16384

/* The smallest and the largest value; NaN if any value is NaN. */
void horizon_range(const float *restrict x, int64_t size, float *restrict ends)
{
    float low[LANES], high[LANES];
    int32_t odd[LANES];
    int64_t i = 0;
    for (int k = 0; k < LANES; k++) {
        low[k] = INFINITY;
        high[k] = -INFINITY;
        odd[k] = 0;
    }
    for (; i + LANES <= size; i += LANES)
        for (int k = 0; k < LANES; k++) {
            float v = x[i + k];
            low[k] = v < low[k] ? v : low[k];
            high[k] = v > high[k] ? v : high[k];
            odd[k] |= -(v != v);
        }
    for (; i < size; i++) {
        float v = x[i];
        low[0] = v < low[0] ? v : low[0];
        high[0] = v > high[0] ? v : high[0];
        odd[0] |= -(v != v);
    }
#define HALVE(WIDTH)                                                                                                   \
    for (int k = 0; k < WIDTH; k++) {                                                                                  \
        low[k] = low[k + WIDTH] < low[k] ? low[k + WIDTH] : low[k];                                                    \
        high[k] = high[k + WIDTH] > high[k] ? high[k + WIDTH] : high[k];                                               \
        odd[k] |= odd[k + WIDTH];                                                                                      \
    }
    HALVE(16)
    HALVE(8)
    HALVE(4)
    HALVE(2)
    HALVE(1)
    ends[0] = odd[0] ? NAN : low[0];
    ends[1] = odd[0] ? NAN : high[0];
}

/* The smallest and the largest value of each row. */
void horizon_rows(const float *restrict x, int64_t rows, int64_t size, float *restrict lows, float *restrict highs)
{
    float ends[2];
    for (int64_t r = 0; r < rows; r++) {
        horizon_range(x + r * size, size, ends);
        lows[r] = ends[0];
        highs[r] = ends[1];
    }
}

/* Clamp in place; `ends` are those of before. Returns how many values were clamped: it stops before a piece that has
   NaN or infinity, so that whoever looks at the tensor then still finds them. */
int64_t horizon_clamp(float *restrict x, int64_t size, float low, float high, float *restrict ends)
{
    float piece[2];
    ends[0] = INFINITY;
    ends[1] = -INFINITY;
    for (int64_t begin = 0; begin < size; begin += 4096) {
        int64_t count = size - begin < 4096 ? size - begin : 4096;
        float *restrict part = x + begin;
        horizon_range(part, count, piece);
        if (!(piece[0] > -INFINITY && piece[1] < INFINITY))
            return begin;
        ends[0] = piece[0] < ends[0] ? piece[0] : ends[0];
        ends[1] = piece[1] > ends[1] ? piece[1] : ends[1];
        if (piece[0] < low || piece[1] > high)
            for (int64_t i = 0; i < count; i++) {
                float v = part[i];
                v = v < low ? low : v;
                part[i] = v > high ? high : v;
            }
    }
    return size;
}

/* What a count is made of, and what it has counted. What lies below the lowest bin, such as the zeros that a ReLU
   leaves, is counted in turns: to count one place again and again is slow. For the same reason neighbours are counted
   in two places. */
struct count {
    float low, high, lowest, highest;
    int32_t shift, first, turns[BLOCK], room[TURNS + BINS], other[TURNS + BINS];
    int64_t at_low, at_high;
};

/* A block of `horizon_count`. */
static void count_block(struct count *restrict c, const float *restrict part, int size)
{
    int32_t keys[BLOCK], lows = 0, highs = 0;
    float values[BLOCK] = {0};
    for (int i = 0; i < size; i++) {
        float v = part[i];
        lows += v <= c->lowest;
        highs += v >= c->highest;
        v = v < c->low ? c->low : v;
        values[i] = v > c->high ? c->high : v;
    }
    memcpy(keys, values, sizeof keys);
    for (int i = 0; i < BLOCK; i++) {
        int32_t key = ((keys[i] & 0x7fffffff) >> c->shift) - c->first + TURNS;
        key = key > TURNS + BINS - 1 ? TURNS + BINS - 1 : key;
        keys[i] = key > c->turns[i] ? key : c->turns[i];
    }
    if (size == BLOCK)
        for (int i = 0; i < BLOCK; i += 4) {
            c->room[keys[i]]++;
            c->other[keys[i + 1]]++;
            c->room[keys[i + 2]]++;
            c->other[keys[i + 3]]++;
        }
    else
        for (int i = 0; i < size; i++)
            c->room[keys[i]]++;
    c->at_low += lows;
    c->at_high += highs;
}

/* Count magnitudes, clamped to [low, high], by their upper bits: `shift` bits of a float are left out, and `first` is
   the lowest of BINS bins. Values are taken in runs of `run` neighbours, each `stride` after the last, and each counts
   `each` times. `peaks` are the numbers of values at `ends` or beyond. */
void horizon_count(const float *restrict x, int64_t runs, int64_t run, int64_t stride, float low, float high,
                   int32_t shift, int32_t first, int32_t each, const float *restrict ends, int32_t *restrict counts,
                   int64_t *restrict peaks)
{
    struct count c = {low, high, ends[0], ends[1], shift, first, {0}, {0}, {0}, 0, 0};
    float held[BLOCK];
    int filled = 0;
    for (int i = 0; i < BLOCK; i++)
        c.turns[i] = i & (TURNS - 1);
    for (int64_t r = 0; r < runs; r++, x += stride) {
        if (run > BLOCK / 2) {
            for (int64_t begin = 0; begin < run; begin += BLOCK)
                count_block(&c, x + begin, run - begin < BLOCK ? (int)(run - begin) : BLOCK);
            continue;
        }
        if (filled + run > BLOCK) {
            count_block(&c, held, filled);
            filled = 0;
        }
        memcpy(held + filled, x, (size_t)run * sizeof *x);
        filled += (int)run;
    }
    count_block(&c, held, filled);
    for (int i = 0; i < TURNS; i++)
        c.room[TURNS] += c.room[i] + c.other[i];
    for (int i = 0; i < BINS; i++)
        counts[i] += (c.room[TURNS + i] + c.other[TURNS + i]) * each;
    peaks[0] = c.at_low;
    peaks[1] = c.at_high;
}

/* min(max(round(x / step), low), high) * step, halves to even. */
void horizon_round(const float *restrict x, float *restrict y, int64_t size, float step, float low, float high)
{
    for (int64_t i = 0; i < size; i++) {
        float v = nearbyintf(x[i] / step);
        v = v < low ? low : v;
        v = v > high ? high : v;
        y[i] = v * step;
    }
}

/* The same with a step for each row. */
void horizon_round_rows(const float *restrict x, float *restrict y, int64_t rows, int64_t size,
                        const float *restrict steps, float low, float high)
{
    for (int64_t r = 0; r < rows; r++)
        horizon_round(x + r * size, y + r * size, size, steps[r], low, high);
}

/* A block of `horizon_learned`. */
static void learned_block(const float *restrict g, const float *restrict x, const float *restrict y,
                          const float *restrict d, float *restrict passed, int size, float lower, float upper,
                          double *restrict sums)
{
    float moved[BLOCK] = {0};
    for (int i = 0; i < size; i++)
        passed[i] = x[i] <= lower ? 0.0f : x[i] >= upper ? 0.0f : g[i];
    for (int i = 0; i < size; i++) {
        float inside = x[i] <= lower ? 0.0f : x[i] >= upper ? 0.0f : d[i];
        moved[i] = g[i] * (y[i] - inside);
    }
    for (int i = 0; i < BLOCK; i += 2 * LANES)
        for (int k = 0; k < LANES; k++)
            sums[k] += (double)moved[i + k] + (double)moved[i + LANES + k];
}

/* The gradient of rounding with a trained scale: into `to_x` goes g where x lies between the edges, else 0; the result
   is the sum of g * (y - d), where d is 0 outside the edges, and inside x, or y itself if only clipped values count.
   Without `to_x` all of g passes. */
double horizon_learned(const float *restrict g, const float *restrict x, const float *restrict y, float *restrict to_x,
                       int64_t size, float lower, float upper, int32_t is_clip)
{
    double sums[LANES] = {0}, total = 0;
    float nowhere[BLOCK];
    const float *d = is_clip ? y : x;
    int64_t i = 0;
    for (; i + BLOCK <= size; i += BLOCK)
        learned_block(g + i, x + i, y + i, d + i, to_x ? to_x + i : nowhere, BLOCK, lower, upper, sums);
    learned_block(g + i, x + i, y + i, d + i, to_x ? to_x + i : nowhere, (int)(size - i), lower, upper, sums);
    for (int k = 0; k < LANES; k++)
        total += sums[k];
    return total;
}

/* Squared errors of values that are spread evenly within bins, for each scale. Bin i holds held[i] values, between
   edges[i] and edges[i + 1]; `falls` is room for size + 1 numbers. */
void horizon_errors(const double *restrict held, const double *restrict edges, int64_t size,
                    const double *restrict scales, int64_t count, const double *restrict limits, int64_t ways,
                    double *restrict falls, double *restrict found)
{
    double before = 0;
    for (int64_t i = 0; i < size; i++) {
        double density = held[i] / (edges[i + 1] - edges[i]);
        falls[i] = before - density;
        before = density;
    }
    falls[size] = before;
    for (int64_t s = 0; s < count; s++) {
        double inverse = 1 / scales[s], total = 0;
        for (int64_t way = 0; way < ways; way++) {
            double limit = limits[way], sums[8] = {0};
            int64_t i = 0;
            for (; i + 8 <= size + 1; i += 8)
                for (int k = 0; k < 8; k++) {
                    double t = edges[i + k] * inverse, nearest = nearbyint(t);
                    nearest = nearest > limit ? limit : nearest;
                    t -= nearest;
                    sums[k] += falls[i + k] * (nearest * (1.0 / 12) + t * t * t * (1.0 / 3));
                }
            for (; i < size + 1; i++) {
                double t = edges[i] * inverse, nearest = nearbyint(t);
                nearest = nearest > limit ? limit : nearest;
                t -= nearest;
                sums[0] += falls[i] * (nearest * (1.0 / 12) + t * t * t * (1.0 / 3));
            }
            for (int k = 0; k < 8; k++)
                total += sums[k];
        }
        found[s] = total * (scales[s] * scales[s] * scales[s]) / (double)ways;
    }
}

/* Of scales between given ones, the best: those at `places`, counted in steps from the first, and those on whose grid a
   value of `ends` lies. The error is that of the given scales, interpolated, and that of `points`; of equals the least
   scale counts, by `weight`. Points and ends are a magnitude, how many have it, and the steps at which it is clipped. */
double horizon_between(const double *restrict scales, const double *restrict errors, int64_t count,
                       const double *restrict places, int64_t size, const double *restrict ends, int64_t grids,
                       const double *restrict points, int64_t known, double weight, double *restrict reached)
{
    double first = scales[0], last = scales[count - 1], step = (last - first) / (double)(count - 1);
    double smallest = first < last ? first : last, largest = first < last ? last : first, least = INFINITY;
    double best = first;
    for (int64_t way = -1; way < grids; way++) {
        if (way >= 0 && !(ends[3 * way + 1] > 1))
            continue;
        for (int64_t i = 0; i < size; i++) {
            double scale = first + places[i] * step, error, part;
            if (way >= 0) {
                double steps = nearbyint(ends[3 * way] / scale);
                scale = ends[3 * way] / (steps < 1 ? 1 : steps);
                scale = scale < smallest ? smallest : scale > largest ? largest : scale;
            }
            double place = (scale - first) / step;
            int64_t begin = (int64_t)place;
            begin = begin < 0 ? 0 : begin > count - 2 ? count - 2 : begin;
            part = place - (double)begin;
            error = errors[begin] + part * (errors[begin + 1] - errors[begin]);
            double inverse = 1 / scale, sum = 0;
            for (int64_t k = 0; k < known; k++) {
                const double *point = points + 3 * k;
                double t = inverse * point[0], nearest = nearbyint(t);
                t -= nearest < point[2] ? nearest : point[2];
                sum += t * t * point[1];
            }
            error += sum * (scale * scale);
            error += weight * (scale * scale);
            if (error < least) {
                least = error;
                best = scale;
            }
        }
    }
    *reached = least;
    return best;
}

/* The first place of int32 counts up to which `wanted` values lie. */
int64_t horizon_reach(const int32_t *restrict counts, int64_t size, int64_t wanted)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < size; i++) {
        sum += counts[i];
        if (sum >= wanted)
            return i;
    }
    return size;
}

/* The bytes of 16-bit numbers, with bits that are turned around. */
void horizon_halves(const int16_t *restrict x, int64_t size, int32_t turned, uint8_t *restrict low,
                    uint8_t *restrict high)
{
    uint16_t mask = (uint16_t)turned;
    for (int64_t i = 0; i < size; i++) {
        uint16_t v = (uint16_t)x[i] ^ mask;
        low[i] = (uint8_t)v;
        high[i] = (uint8_t)(v >> 8);
    }
}

/* Sums of a layer, [rows, columns] in several pieces of which each counts `weights` times, with bias and residual, by
   a factor for each column, rounded half up and limited. */
#define FINISH(NAME, SUM, OUT)                                                                                         \
    void NAME(const SUM *const *pieces, const double *weights, int64_t count, const int16_t *residual,                 \
              const double *ratio, const double *bias, const double *factor, int64_t rows, int64_t columns,            \
              double low, double high, OUT *out)                                                                       \
    {                                                                                                                  \
        double acc[BLOCK];                                                                                             \
        for (int64_t row = 0; row < rows; row++)                                                                       \
            for (int64_t begin = 0; begin < columns; begin += BLOCK) {                                                 \
                int size = columns - begin < BLOCK ? (int)(columns - begin) : BLOCK;                                   \
                int64_t place = row * columns + begin;                                                                 \
                for (int i = 0; i < size; i++)                                                                         \
                    acc[i] = bias[begin + i];                                                                          \
                for (int64_t k = 0; k < count; k++) {                                                                  \
                    const SUM *piece = pieces[k] + place;                                                              \
                    double weight = weights[k];                                                                        \
                    for (int i = 0; i < size; i++)                                                                     \
                        acc[i] += (double)piece[i] * weight;                                                           \
                }                                                                                                      \
                if (residual)                                                                                          \
                    for (int i = 0; i < size; i++)                                                                     \
                        acc[i] += floor((double)residual[place + i] * ratio[begin + i] + 0.5);                         \
                for (int i = 0; i < size; i++) {                                                                       \
                    double v = floor(acc[i] * factor[begin + i] + 0.5);                                                \
                    v = v < low ? low : v;                                                                             \
                    v = v > high ? high : v;                                                                           \
                    out[place + i] = (OUT)v;                                                                           \
                }                                                                                                      \
            }                                                                                                          \
    }

FINISH(horizon_finish_float_16, float, int16_t)
FINISH(horizon_finish_float_8, float, int8_t)
FINISH(horizon_finish_int_16, int32_t, int16_t)
FINISH(horizon_finish_int_8, int32_t, int8_t)

/* The same of sums that float32 holds, in its arithmetic: bias and residual are added, the product with the factor is
   rounded half to even and limited. */
#define SETTLE(NAME, SUM, OUT)                                                                                         \
    void NAME(const SUM *restrict sums, const float *restrict bias, const int8_t *restrict residual,                   \
              const float *restrict ratio, const float *restrict factor, int64_t rows, int64_t columns, float low,     \
              float high, OUT *restrict out)                                                                           \
    {                                                                                                                  \
        float acc[BLOCK];                                                                                              \
        for (int64_t row = 0; row < rows; row++)                                                                       \
            for (int64_t begin = 0; begin < columns; begin += BLOCK) {                                                 \
                int size = columns - begin < BLOCK ? (int)(columns - begin) : BLOCK;                                   \
                int64_t place = row * columns + begin;                                                                 \
                for (int i = 0; i < size; i++)                                                                         \
                    acc[i] = (float)sums[place + i];                                                                   \
                if (bias)                                                                                              \
                    for (int i = 0; i < size; i++)                                                                     \
                        acc[i] += bias[begin + i];                                                                     \
                if (residual)                                                                                          \
                    for (int i = 0; i < size; i++)                                                                     \
                        acc[i] += floorf((float)residual[place + i] * ratio[begin + i] + 0.5f);                        \
                for (int i = 0; i < size; i++) {                                                                       \
                    float v = nearbyintf(acc[i] * factor[begin + i]);                                                  \
                    v = v < low ? low : v;                                                                             \
                    v = v > high ? high : v;                                                                           \
                    out[place + i] = (OUT)v;                                                                           \
                }                                                                                                      \
            }                                                                                                          \
    }

SETTLE(horizon_settle_float_16, float, int16_t)
SETTLE(horizon_settle_float_8, float, int8_t)
SETTLE(horizon_settle_int_16, int32_t, int16_t)
SETTLE(horizon_settle_int_8, int32_t, int8_t)
