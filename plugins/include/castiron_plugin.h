/* What a host plugin kernel is given: plain C, so that any compiler can make one (docs/plugins.md).
 *
 * A kernel is a function `const char* name(const castiron_call*)` with C linkage. Every compute thread calls
 * it once a step with its own `part` of `parts`; the calls share no order, so a thread writes only what its
 * part covers. It returns NULL, or a text (of static life) that says what went wrong: the step then fails.
 * Operands come in the order of the tactic's Call. It must not read or write outside of them.
 */
#ifndef CASTIRON_PLUGIN_H
#define CASTIRON_PLUGIN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CASTIRON_MAX_RANK 6

enum castiron_dtype { CASTIRON_F32 = 0, CASTIRON_I32 = 1, CASTIRON_BF16 = 2 };

struct castiron_tensor {
    void* data; /* read-only for inputs and weights */
    int32_t dtype;
    int32_t rank;
    int64_t shape[CASTIRON_MAX_RANK]; /* those of this step */
    int64_t row_stride;               /* elements between rows of a two-dimensional input; else row length */
};

struct castiron_call {
    int32_t part;
    int32_t parts;
    int32_t num_inputs;
    int32_t num_weights;
    int32_t num_outputs;
    const struct castiron_tensor* inputs;
    const struct castiron_tensor* weights;
    const struct castiron_tensor* outputs;
};

typedef const char* (*castiron_kernel)(const struct castiron_call* call);

/* Name of a symbol that a plugin's library must export: int castiron_plugin_abi = CASTIRON_PLUGIN_ABI.
 * Including this header in the file of the kernels, with CASTIRON_PLUGIN_SOURCE defined, makes it. */
#define CASTIRON_PLUGIN_ABI 1
#ifdef CASTIRON_PLUGIN_SOURCE
__attribute__((visibility("default"))) int castiron_plugin_abi = CASTIRON_PLUGIN_ABI;
#endif

#ifdef __cplusplus
}
#endif

#endif
