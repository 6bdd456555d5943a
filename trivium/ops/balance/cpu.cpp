// Routing and quantile balancing: selections, which are exact, so that all backends choose alike.
#include <vector>

#include "kernel.h"

using namespace trivium;

constexpr int64_t TOKENS = 32;

namespace {

// The `count` largest of what is offered in rising order of ids: largest first, of equals the lower id. nan counts as
// -inf, so that a row of nan still has valid ids.
class Largest {
  public:
    explicit Largest(int64_t count) : values_(count + 1), ids_(count + 1), most_(count) {}

    void clear() { count_ = 0; }
    float value(int64_t i) const { return values_[i]; }
    const int64_t* ids() const { return ids_.data(); }

    // W values of ids from `first` on, of which the first n count.
    void offer(vf values, int64_t first, int64_t n) {
        if (count_ == most_ && n >= W && !any(values > splat(values_[count_ - 1]))) return;
        for (int64_t i = 0; i < std::min<int64_t>(n, W); i++) {
            float value = values[i] == values[i] ? values[i] : -__builtin_inff();
            int64_t at = count_;
            if (count_ == most_) {
                if (!(value > values_[most_ - 1])) continue;
                at = most_ - 1;
            } else {
                count_++;
            }
            for (; at > 0 && value > values_[at - 1]; at--) values_[at] = values_[at - 1], ids_[at] = ids_[at - 1];
            values_[at] = value, ids_[at] = first + i;
        }
    }

  private:
    static bool any(vi mask) {
        int64_t words[W / 2], all = 0;
        std::memcpy(words, &mask, sizeof mask);
        for (int64_t word : words) all |= word;
        return all != 0;
    }

    std::vector<float> values_;
    std::vector<int64_t> ids_;
    int64_t most_, count_ = 0;
};

// The `count` largest of score + bias, ids rising.
void select(const float* score, const float* bias, int64_t E, int64_t count, Largest& largest, int64_t* ids) {
    largest.clear();
    for (int64_t e = 0; e < E; e += W) largest.offer(load_n(score + e, E - e) + load_n(bias + e, E - e), e, E - e);
    std::copy_n(largest.ids(), count, ids);
    std::sort(ids, ids + count);
}

template <typename F>
void for_tokens(int64_t num_threads, int64_t T, F&& work) {
    parallel(num_threads, (T + TOKENS - 1) / TOKENS, [&](int64_t tile) {
        work(tile * TOKENS, std::min(T, (tile + 1) * TOKENS));
    });
}

}  // namespace

// experts [T, k]
TRIVIUM_KERNEL void trivium_select_experts(
    int64_t num_threads, const float* score, const float* bias, int64_t* experts, int64_t T, int64_t E, int64_t k
) {
    for_tokens(num_threads, T, [&](int64_t first, int64_t last) {
        Largest largest(k);
        for (int64_t t = first; t < last; t++) select(score + t * E, bias, E, k, largest, experts + t * k);
    });
}

// score = sigmoid(logit), the experts chosen by score + bias, and their weights.
TRIVIUM_KERNEL void trivium_route(
    int64_t num_threads, const float* logit, const float* bias, int64_t* experts, float* weights, float* score, int64_t T,
    int64_t E, int64_t k, float scale
) {
    for_tokens(num_threads, T, [&](int64_t first, int64_t last) {
        Largest largest(k);
        for (int64_t t = first; t < last; t++) {
            for (int64_t e = 0; e < E; e += W)
                store_n(score + t * E + e, sigmoid(load_n(logit + t * E + e, E - e)), E - e);
            select(score + t * E, bias, E, k, largest, experts + t * k);
            float total = 0;
            for (int64_t i = 0; i < k; i++) total += score[t * E + experts[t * k + i]];
            for (int64_t i = 0; i < k; i++)
                weights[t * k + i] = score[t * E + experts[t * k + i]] / (total + 1e-20f) * scale;
        }
    });
}

// d_logit from d_weights, and from d_score where it is not null. With n = the sum of the chosen scores + 1e-20:
// d score_i = scale / n (d weight_i - sum_j d weight_j score_j / n), and e / (1 + e)^2 of e = exp(-|logit|) behind it.
TRIVIUM_KERNEL void trivium_route_backward(
    int64_t num_threads, const float* d_weights, const float* d_score, const float* logit, const int64_t* experts,
    float* d_logit, int64_t T, int64_t E, int64_t k, float scale
) {
    for_tokens(num_threads, T, [&](int64_t first, int64_t last) {
        std::vector<float> chosen(k + W), d_chosen(k);
        for (int64_t t = first; t < last; t++) {
            const int64_t* ids = experts + t * k;
            for (int64_t i = 0; i < k; i++) chosen[i] = logit[t * E + ids[i]];
            for (int64_t i = 0; i < k; i += W) store_n(&chosen[i], sigmoid(load_n(&chosen[i], k - i)), k - i);
            float total = 1e-20f, product = 0;
            for (int64_t i = 0; i < k; i++) total += chosen[i];
            if (d_weights)
                for (int64_t i = 0; i < k; i++) product += d_weights[t * k + i] * (chosen[i] / total);
            float* out = d_logit + t * E;
            if (d_score)
                std::memcpy(out, d_score + t * E, 4 * E);
            else
                std::fill_n(out, E, 0.0f);
            if (d_weights)
                for (int64_t i = 0; i < k; i++) out[ids[i]] += scale / total * (d_weights[t * k + i] - product);
            for (int64_t e = 0; e < E; e += W) {
                vf power = exp(-abs(load_n(logit + t * E + e, E - e))), below = 1.0f / (1.0f + power);
                store_n(out + e, load_n(out + e, E - e) * (power * below * below), E - e);
            }
        }
    });
}

// The new bias before its mean is taken off: minus the (fair_share + 1)-th largest over the tokens of score - threshold,
// the threshold being a token's (k + 1)-th largest score + bias. threshold [N], excess [E, N]: scratch.
TRIVIUM_KERNEL void trivium_quantile_balance(
    int64_t num_threads, const float* score, float* bias, float* threshold, float* excess, int64_t N, int64_t E, int64_t k,
    int64_t fair_share
) {
    for_tokens(num_threads, N, [&](int64_t first, int64_t last) {
        std::vector<float> sums(E);
        for (int64_t i = first; i < last; i++) {
            for (int64_t e = 0; e < E; e++) sums[e] = score[i * E + e] + bias[e];
            std::nth_element(sums.begin(), sums.begin() + k, sums.end(), std::greater<float>());
            threshold[i] = sums[k];
        }
        for (int64_t e = 0; e < E; e++)
            for (int64_t i = first; i < last; i++) excess[e * N + i] = score[i * E + e] - threshold[i];
    });
    parallel(num_threads, E, [&](int64_t e) {
        float* x = excess + e * N;
        std::nth_element(x, x + fair_share, x + N, std::greater<float>());
        bias[e] = -x[fair_share];
    });
}
