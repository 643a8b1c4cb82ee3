// The linear op: sums of float32 rows and packed panels (linear_product.inl) and what becomes of them.

static void linear(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t block_begin,
                   int64_t block_end, float* scratch, const WeightsAhead& ahead) {
    Product p{
        .x = a.x + row_begin * a.x_stride, .x_stride = a.x_stride, .rows = row_end - row_begin, .k = a.k};
    p.panels_per_output = a.gated ? 2 : 1;
    p.panels = (block_end - block_begin) * p.panels_per_output;
    const int64_t bytes = a.bf16 ? panel_bytes<PairForm>(a.k) : panel_bytes<FloatForm>(a.k);
    p.weight = a.weight + block_begin * p.panels_per_output * bytes;
    if (ahead.next_block >= 0) p.behind = a.weight + ahead.next_block * p.panels_per_output * bytes;
    if (a.places == nullptr) p.y = a.y + row_begin * a.n + block_begin * 16;
    p.y_stride = a.n;
    float* wide = scratch;
    float* acc = scratch + kLinearWideFloats;
    a.bf16 ? product<PairForm>(p, acc, wide) : product<FloatForm>(p, acc, wide);
    linear_output<FloatRows>(a, row_begin, row_end, block_begin, block_end, acc);
}
