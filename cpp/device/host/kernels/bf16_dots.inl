// Products of rows and weights that are both bf16, by the instruction that adds two products at once
// (VDPBF16PS): linear_product.inl's sums over inputs that are pairs. Of each pair the odd one is added first,
// both as a fused multiply-add; numbers below the smallest normal one count as zero.

struct DotForm : FloatForm {
    static constexpr int kNumbers = 2;
    CASTIRON_INLINE Vec multiply_add(Vec a, Vec w, Vec c) {
        const auto pairs = [](Vec v) { return reinterpret_cast<__m512bh>(_mm512_castps_si512(v.v)); };
        return {_mm512_dpbf16_ps(c.v, pairs(a), pairs(w))};
    }
};

static void bf16_product(const Bf16Args& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                         int64_t block_end, float* acc, const WeightsAhead& ahead) {
    Product p{.x = reinterpret_cast<const float*>(a.x + row_begin * a.x_stride), .x_stride = a.x_stride / 4};
    p.rows = row_end - row_begin;
    p.k = (a.k + 1) / 2;
    p.panels_per_output = a.gated ? 2 : 1;
    p.panels = (block_end - block_begin) * p.panels_per_output;
    const int64_t block_bytes = p.panels_per_output * panel_bytes<DotForm>(p.k);
    p.weight = a.weight + block_begin * block_bytes;
    if (ahead.next_block >= 0) p.behind = a.weight + ahead.next_block * block_bytes;
    product<DotForm>(p, acc, nullptr);
}
