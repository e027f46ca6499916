import CoreML
import Foundation

/// A model that writes, from a folder with a `runner.json`: tokens in, tokens out as they come.
public final class Runner {
    public let file: RunnerFile
    /// Function -> its part in each chunk, in the order in which they run.
    private let models: [String: [MLModel]]
    private let states: [MLState?]
    /// Caches that are inputs and come back as outputs.
    private var held: [String: MLFeatureValue] = [:]
    public private(set) var read: [Int32] = []
    /// Beyond the context, so many of the oldest tokens are forgotten at once, and the rest is read again as a
    /// text of its own; without it, too long a text is an error.
    public var drop: Int?

    /// Compile and load the packages of a folder.
    public init(_ folder: URL) async throws {
        file = try RunnerFile.read(folder)
        var models: [String: [MLModel]] = [:]
        for (number, chunk) in file.chunks.enumerated() {
            let compiled = try await MLModel.compileModel(at: folder.appendingPathComponent(chunk))
            for (name, function) in file.functions where function.chunks.contains(number) {
                let configuration = MLModelConfiguration()
                configuration.computeUnits = function.units == "cpuOnly" ? .cpuOnly : .cpuAndNeuralEngine
                configuration.functionName = name
                let model = try await MLModel.load(contentsOf: compiled, configuration: configuration)
                models[name, default: []].append(model)
            }
        }
        self.models = models
        guard let decode = models["decode"], let function = file.functions["decode"] else {
            throw RunnerError.missing("decode")
        }
        states = decode.map { function.states.isEmpty ? nil : $0.makeState() }
        for (name, port) in function.inputs where function.outputs["\(name)_out"] != nil {
            held[name] = MLFeatureValue(multiArray: try Runner.zeros(port))
        }
    }

    /// The tokens that are written after a prompt, each as soon as it is chosen.
    public func generate(
        _ prompt: [Int32], steps: Int, sampler: Sampler = Sampler(), stop: Set<Int32> = []
    ) -> AsyncThrowingStream<Int32, Error> {
        AsyncThrowingStream { continuation in
            let task = Task {
                do {
                    var choice = sampler
                    let ends = stop.union(self.file.ends.map { Int32($0) })
                    var logits = try await self.feed(prompt)
                    for step in 0..<steps {
                        try Task.checkCancellation()
                        let token = choice.choose(logits, read: self.read)
                        continuation.yield(token)
                        if ends.contains(token) || step == steps - 1 { break }
                        logits = try await self.feed([token])
                    }
                    continuation.finish()
                } catch {
                    continuation.finish(throwing: error)
                }
            }
            continuation.onTermination = { _ in task.cancel() }
        }
    }

    /// Read tokens; the logits after the last of them.
    public func feed(_ tokens: [Int32]) async throws -> [Float] {
        guard !tokens.isEmpty else { throw RunnerError.empty }
        let over = read.count + tokens.count - file.context
        if over > 0 {
            guard let drop, drop > 0, drop < file.context else {
                throw RunnerError.tooLong(tokens: read.count + tokens.count, context: file.context)
            }
            let left = Array((read + tokens).dropFirst((over + drop - 1) / drop * drop))
            read = []
            return try await feed(left)
        }
        let longest = file.functions.values.compactMap { file.port(of: $0)?.shape.last }.max() ?? 1
        var logits: [Float] = []
        for start in stride(from: 0, to: tokens.count, by: longest) {
            let part = tokens[start..<min(start + longest, tokens.count)]
            read += part
            logits = try await step(function(reading: part.count), newest: part.count)
        }
        return logits
    }

    /// Of the functions that read enough tokens at once, the one of the smallest context that holds the text.
    private func function(reading count: Int) throws -> String {
        let reading = file.functions.filter { !$0.key.hasSuffix("_inputs") }
        let sizes = reading.mapValues {
            (length: file.port(of: $0)?.shape.last ?? 0, context: $0.context ?? file.context)
        }
        let fitting = sizes.filter { $0.value.length >= count && $0.value.context >= read.count }
        let smallest = fitting.min { ($0.value.length, $0.value.context) < ($1.value.length, $1.value.context) }
        guard let smallest else { throw RunnerError.missing("prefill") }
        return smallest.key
    }

    /// One call, whose last token is the last that was read.
    private func step(_ name: String, newest: Int) async throws -> [Float] {
        guard let function = file.functions[name], let port = file.port(of: function) else {
            throw RunnerError.missing(name)
        }
        let length = port.shape.last ?? 1
        // Near the end of the context a call begins earlier, and reads some tokens again.
        let start = min(read.count - newest, (function.context ?? file.context) - length)
        let row = Array(read[start...]) + Array(repeating: 0, count: max(0, length - (read.count - start)))
        var values = held
        let tokens = MLShapedArray<Int32>(scalars: row, shape: port.shape)
        values[file.tokens] = MLFeatureValue(shapedArray: tokens)
        let position = MLFeatureValue(shapedArray: MLShapedArray<Int32>(scalars: [Int32(start)], shape: [1]))
        if function.inputs["position"] != nil { values["position"] = position }
        let last = read.count - 1 - start
        if let port = function.inputs[function.picks] {
            let array = try Runner.zeros(port)
            array[last] = 1
            values[function.picks] = MLFeatureValue(multiArray: array)
        }
        if let maker = models[function.inputsFrom]?.first {
            let names = maker.modelDescription.inputDescriptionsByName.keys
            let whole = values.merging(["position": position]) { $1 }
            let provider = try MLDictionaryFeatureProvider(dictionary: whole.filter { names.contains($0.key) })
            try merge(await maker.prediction(from: provider), into: &values)
        }
        for (model, state) in zip(models[name] ?? [], states) {
            let names = model.modelDescription.inputDescriptionsByName.keys
            let provider = try MLDictionaryFeatureProvider(dictionary: values.filter { names.contains($0.key) })
            if let state {
                try merge(await model.prediction(from: provider, using: state), into: &values)
            } else {
                try merge(await model.prediction(from: provider), into: &values)
            }
        }
        for name in held.keys { held[name] = values["\(name)_out"] }
        guard let array = values[file.logits]?.multiArrayValue else { throw RunnerError.missing(file.logits) }
        if let best = values[file.values]?.multiArrayValue { return Runner.row(of: array, best) }
        let scalars = MLShapedArray<Float>(converting: array).scalars
        guard length > 1 && function.picks.isEmpty else { return scalars }
        let words = scalars.count / length
        return Array(scalars[(last * words)..<((last + 1) * words)])
    }

    /// A row of logits from the likeliest token of each part of the vocabulary: all others are below these.
    private static func row(of tokens: MLMultiArray, _ values: MLMultiArray) -> [Float] {
        let places = MLShapedArray<Int32>(converting: tokens).scalars.map { Int($0) }
        var logits = [Float](repeating: -.infinity, count: (places.max() ?? 0) + 1)
        for (place, value) in zip(places, MLShapedArray<Float>(converting: values).scalars) {
            logits[place] = value
        }
        return logits
    }

    private func merge(_ made: MLFeatureProvider, into values: inout [String: MLFeatureValue]) throws {
        for name in made.featureNames { values[name] = made.featureValue(for: name) }
    }

    private static func zeros(_ port: RunnerFile.Port) throws -> MLMultiArray {
        let type: MLMultiArrayDataType = port.dtype == "fp16" ? .float16 : .float32
        let array = try MLMultiArray(shape: port.shape.map { NSNumber(value: $0) }, dataType: type)
        for i in 0..<array.count { array[i] = 0 }
        return array
    }
}
