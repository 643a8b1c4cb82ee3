// What another row costs a step, and what it may bring.
#pragma once

namespace castiron {

// How long a step of so many decoding rows takes: a line through the steps that ran, of which the latest
// count most.
class StepCost {
public:
    void observe(int rows, double seconds);

    // Seconds of a step of `rows` rows. Before anything was observed the unit is such a step of one row.
    [[nodiscard]] double seconds(int rows) const { return base_ + per_row_ * rows; }
    [[nodiscard]] double per_row() const { return per_row_; }
    [[nodiscard]] bool observed() const { return weight_ > 0; }

private:
    // What a row is taken to cost, in steps of one row, until steps of different sizes were seen.
    static constexpr double kFirstGuess = 0.15;

    double base_ = 1 - kFirstGuess;
    double per_row_ = kFirstGuess;
    // Weights, and weighted sums of rows and seconds, of what was observed.
    double weight_ = 0;
    double rows_ = 0;
    double seconds_ = 0;
    double rows_squared_ = 0;
    double rows_seconds_ = 0;
};

// A step as it is being put together: the tokens to expect of it and the time it will take. A guess is worth
// its row as long as it does not lower the tokens to expect per second.
class StepValue {
public:
    // decodes: rows that give a token each, whatever comes. room: rows that may be added.
    StepValue(const StepCost& cost, int decodes, int room)
        : tokens_(decodes), seconds_(cost.seconds(decodes)), per_row_(cost.per_row()), room_(room) {}

    // Whether a guess that is right with this probability would be worth it. `seconds`: what it costs besides
    // its row.
    [[nodiscard]] bool worth(double probability, double seconds = 0) const {
        return room_ > 0 && probability * seconds_ >= (per_row_ + seconds) * tokens_;
    }
    // Adds a guess that is worth it.
    void add(double probability) {
        tokens_ += probability;
        seconds_ += per_row_;
        --room_;
    }

private:
    double tokens_;
    double seconds_;
    double per_row_;
    int room_;
};

}  // namespace castiron
