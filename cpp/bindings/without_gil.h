// The GIL released for a scope. In place of nb::gil_scoped_release, which ends the process where a daemon
// thread comes back from a call while Python finalizes.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace castiron::bindings {

class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

    // Up to 3.13 Python answers a thread that asks for the GIL too late with pthread_exit. glibc unwinds the
    // stack for it as for an exception, and the first noexcept frame (this destructor's, then nanobind's)
    // would call std::terminate. So the thread stays here until the process ends, which is what 3.14 does by
    // itself.
    ~WithoutGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }

private:
    PyThreadState* state_;
};

}  // namespace castiron::bindings
