import CoreML
import Foundation

/// A folder of sizes: arrays of any length that `sizes.json` allows in, arrays of that length out; one call at a time.
public final class SizedModel {
    public let file: SizesFile
    private let folder: URL
    private let units: MLComputeUnits
    /// Package -> where it is compiled.
    private var compiled: [String: URL] = [:]
    /// Size -> its model.
    private var models: [String: PlainModel] = [:]

    /// Read `sizes.json`. A size is compiled and loaded when it is first called.
    public init(_ folder: URL, units: MLComputeUnits = .cpuAndNeuralEngine) throws {
        file = try SizesFile.read(folder)
        self.folder = folder
        self.units = units
    }

    /// The outputs by name, of the smallest size that holds the inputs.
    public func predict(_ inputs: [String: Numbers]) async throws -> [String: Numbers] {
        let (size, lengths) = try file.choose(inputs.mapValues { $0.shape })
        let model = try await load(size)
        let filled = lengths.isEmpty ? inputs : try self.filled(inputs, size)
        var outputs = try await model.predict(filled)
        for (one, length) in zip(file.padding.each, lengths) {
            for (name, axis) in one.outputs {
                outputs[name] = outputs[name].map { cropped($0, axis, length / (one.shares[name] ?? 1)) }
            }
        }
        return outputs
    }

    /// The model of a size, which stays loaded.
    public func load(_ size: SizesFile.Size) async throws -> PlainModel {
        if let model = models[size.name] { return model }
        let place = try await compile(size.package)
        let model = try await PlainModel(compiled: place, function: size.function, units: units)
        models[size.name] = model
        return model
    }

    private func compile(_ package: String) async throws -> URL {
        if let place = compiled[package] { return place }
        let place = try await MLModel.compileModel(at: folder.appendingPathComponent(package))
        compiled[package] = place
        return place
    }

    /// The inputs, those shorter than a size filled up along one length after the other.
    private func filled(_ inputs: [String: Numbers], _ size: SizesFile.Size) throws -> [String: Numbers] {
        var whole = inputs
        for one in file.padding.each {
            for (name, axis) in one.inputs {
                guard let given = whole[name], let length = size.inputs[name]?[axis] else { continue }
                if given.shape[axis] == length { continue }
                try file.check(name, given.values, shape: given.shape, along: one)
                var shape = given.shape
                shape[axis] = length
                let values = file.filled(
                    given.values, shape: given.shape, axis: axis, to: length, with: one.fill[name] ?? 0)
                whole[name] = Numbers(shape: shape, dtype: given.dtype, values: values)
            }
        }
        return whole
    }

    private func cropped(_ numbers: Numbers, _ axis: Int, _ length: Int) -> Numbers {
        var shape = numbers.shape
        shape[axis] = length
        let values = file.cropped(numbers.values, shape: numbers.shape, axis: axis, to: length)
        return Numbers(shape: shape, dtype: numbers.dtype, values: values)
    }
}
